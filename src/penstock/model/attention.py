"""Which kinds of attention a model computes, from its configuration alone. Importable without torch."""

from __future__ import annotations

from typing import Any

FULL = "full_attention"


def attention_kinds(config: Any) -> set[str]:
    """The kinds in a Transformers text configuration; one that has a window but lists no layers has it in all."""
    if layers := getattr(config, "layer_types", None):
        return set(layers)
    return {FULL if getattr(config, "sliding_window", None) is None else "sliding_attention"}
