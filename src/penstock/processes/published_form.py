"""The form in which servers get the policy: names, shapes and dtype of its weights.

Our own server holds weights as Transformers does. Other engines read the names of published models; where these are the
same tensors under other names, ranks can write their own rows. Else tensors are converted, whole. Adapters have the
same form for all engines: that of peft, in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.model.load_policy import with_original_names, with_tied_names
from penstock.trainer.lora import Part, weights_of
from penstock.trainer.shards import WeightRows
from penstock.weights import shared_memory
from penstock.weights.shared_memory import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedForm:
    """How a model's weights are published."""

    model: Any
    engine: str
    part: Part
    """Which of the model's weights."""
    dtype: torch.dtype
    layout: Layout
    """Of the file."""
    names: Mapping[str, list[str]] | None
    """The names under which each weight is published; None if some are converted."""
    one_by_one: bool
    """Whether each weight can be converted by itself."""

    @classmethod
    def of(
        cls,
        model: Any,
        parameters: Mapping[str, Tensor],
        *,
        engine: str,
        dtype: torch.dtype,
        part: Literal["merged", "base"] = "merged",
    ) -> PublishedForm:
        """Return the form of a model with these `parameters`, for servers that compute in `dtype`."""
        own = {name: torch.empty(each.shape, dtype=dtype, device="meta") for name, each in parameters.items()}
        whole = _converted(model, engine, own)
        single = {name: _converted(model, engine, {name: tensor}) for name, tensor in own.items()}
        is_same = all(each is own[name] for name, parts in single.items() for each in parts.values())
        together = shared_memory.layout({name: each for parts in single.values() for name, each in parts.items()})
        layout = shared_memory.layout(whole)
        return cls(
            model=model,
            engine=engine,
            part=part,
            dtype=dtype,
            layout=layout,
            names={name: list(parts) for name, parts in single.items()} if is_same else None,
            one_by_one=together == layout,
        )

    @classmethod
    def of_adapters(cls, model: Any) -> PublishedForm:
        """Return the form of the adapters of a model."""
        layout = shared_memory.layout(dict(weights_of(model, "adapters")))
        return cls(
            model=model,
            engine="penstock",
            part="adapters",
            dtype=torch.float32,
            layout=layout,
            names={name: [name] for name in layout},
            one_by_one=True,
        )

    def renamed(self, weights: Iterable[WeightRows]) -> Iterator[tuple[str, WeightRows]]:
        """Yield rows that are not converted, under each name that they are published with."""
        assert self.names is not None
        for weight in weights:
            for name in self.names.get(weight.name, ()):
                yield name, weight

    def converted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights in this form. Only one at a time is held, if each can be converted by itself."""
        rounded = ((name, tensor.to(self.dtype)) for name, tensor in weights)
        parts = ({name: tensor} for name, tensor in rounded) if self.one_by_one else [dict(rounded)]
        for part in parts:
            yield from _converted(self.model, self.engine, part).items()


def _converted(model: Any, engine: str, named: dict[str, Tensor]) -> dict[str, Tensor]:
    if engine == "penstock":
        return named
    return with_original_names(model, with_tied_names(model, named) if engine == "vllm" else named)
