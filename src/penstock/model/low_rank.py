"""Low-rank adapters: how they change a weight, and their names in peft's files.

Trainer and engine add them to a weight in the same way, so that both compute with the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

PREFIX = "base_model.model."
"""Of all names in peft's files."""


def names_of(target: str) -> tuple[str, str]:
    """Return the names of A and B of the weight `target` in a file of adapters."""
    module = target.removesuffix(".weight")
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def describe_adapters(names: Iterable[str], directory: Path, *, rank: int, alpha: int, base: str) -> None:
    """Write the file beside adapters that says how they are added to the model `base`. Other engines, and peft, read
    it. `names`: of all tensors of the adapters."""
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in names}),
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=2))


def change_of(a: Tensor, b: Tensor, *, alpha: float) -> Tensor:
    """Return what adapters `a`, [rank, inputs], and `b`, [outputs, rank], add to a weight, [outputs, inputs]."""
    return (b @ a).mul_(alpha / len(a))


def merged(weight: Tensor, change: Tensor) -> Tensor:
    """Return a weight plus its float32 change, rounded once. The change is overwritten, which saves memory."""
    return change.add_(weight).to(weight.dtype)
