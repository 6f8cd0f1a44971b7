"""What all parts of the configuration share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, strict about names, documented by the docstrings under its fields."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
