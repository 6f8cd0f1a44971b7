"""Base class of all sections of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator


class Section(BaseModel):
    """A frozen part of the configuration that rejects unknown keys; the docstrings under its fields are their help
    text."""

    model_config = ConfigDict(
        frozen=True, strict=True, allow_inf_nan=False, extra="forbid", use_attribute_docstrings=True
    )

    def contradictions(self) -> Iterator[str]:
        """Yield the reasons why these settings cannot be used together. Each names the settings and the remedy."""
        yield from ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        for reason in self.contradictions():
            raise ValueError(reason)
        return self
