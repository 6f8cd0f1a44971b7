"""Low-rank adapters (Hu et al., arXiv 2106.09685) through peft: adapters are trained, and servers add them to the
weights that they have (`model/low_rank.py`)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from transformers import PreTrainedModel

from penstock.config import ConfigError, LoraConfig
from penstock.model.low_rank import PREFIX, describe_adapters, merged
from penstock.trainer.shards import like

ADAPTER = "default"

Part = Literal["merged", "base", "adapters"]
"""Which weights of a model: all, with their adapters; all, without them; or the adapters alone, by their names in
peft's files. Without adapters, the first two are the same."""


def attach(model: PreTrainedModel, config: LoraConfig, dtype: torch.dtype = torch.float32) -> None:
    """Freeze `model`, with weights of `dtype`, and insert trainable float32 adapters into its layers, in place.

    Only linear layers get adapters: experts that a layer holds as one tensor stay as they are. Raises `ConfigError` if
    peft is missing, no layer matches the targets, or a target shares its weights.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError:
        raise ConfigError("trainer.lora needs the package peft: pip install 'penstock[lora]'") from None
    every = config.targets == "all-linear"
    targets: Any = config.targets if every else list(config.targets)
    adapters = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        exclude_modules=_output_layers(model) if every else None,
        lora_dropout=0.0,
    )
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    try:
        with warnings.catch_warnings():  # hide the warning about shared weights, which are refused below
            warnings.simplefilter("ignore", UserWarning)
            inject_adapter_in_model(adapters, _Plain(model), adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(f"trainer.lora.targets {config.targets}: {error}") from None
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    if (name := _shared(model)) is not None:
        raise ConfigError(f"trainer.lora.targets {config.targets}: {name} shares its weights with another layer")


class _Plain(Module):
    """Contains a model. In a model that it knows, peft would give adapters to experts and routers too, which
    `merged_weights` could not merge."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model


def _output_layers(model: Any) -> list[str]:
    """Return the name of the output layer, if there is one."""
    head = model.get_output_embeddings()
    return [name for name, part in model.named_modules() if part is head]


def is_adapter(name: str) -> bool:
    """Return whether the parameter of this name belongs to an adapter."""
    return ".lora_" in name


def has_adapters(model: PreTrainedModel) -> bool:
    """Return whether `attach` was called for this model."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Let the model compute without its adapters during the body, as it was when training began. The body may come
    between a forward and a backward pass, so the adapters stay trainable, which peft's own switch does not leave."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def write_adapters(adapted: Mapping[str, Tensor], config: LoraConfig, directory: Path, *, base: str) -> None:
    """Write the adapters among `adapted` to the new `directory`, in peft's format, for the model `base`."""
    from safetensors.torch import save_file

    weights = {_file_name(name): value.contiguous() for name, value in adapted.items() if is_adapter(name)}
    directory.mkdir()
    describe_adapters(weights, directory, rank=config.rank, alpha=config.alpha, base=base)
    save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _file_name(name: str) -> str:
    return f"{PREFIX}{name.replace(f'.{ADAPTER}.', '.')}"


def _shared(model: PreTrainedModel) -> str | None:
    """Return the name of an adapted layer that shares its weights with another layer, or None.

    Such a layer cannot be merged.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    owners = Counter(id(parameter) for _, parameter in named)
    shared = (name for name, parameter in named if ".base_layer." in name and owners[id(parameter)] > 1)
    return next((name.partition(".base_layer.")[0] for name in shared), None)


def weights_of(model: PreTrainedModel, part: Part) -> Iterator[tuple[str, Tensor]]:
    """Yield a part of the model's weights by name, each tied weight once."""
    match part:
        case "merged":
            yield from merged_weights(model)
        case "base":
            yield from plain_parameters(model)
        case "adapters":
            for name, parameter in model.named_parameters():
                if is_adapter(name):
                    yield _file_name(name), parameter.detach()


def targets_of(model: PreTrainedModel) -> tuple[str, ...] | None:
    """Return the names of the weights with adapters; None if adapters of a layer are not added as `change_of` does: it
    is no `torch.nn.Linear`."""
    layers: list[tuple[str, Any]] = [
        (name, module) for name, module in model.named_modules() if hasattr(module, "get_delta_weight")
    ]
    if any(not isinstance(module.get_base_layer(), torch.nn.Linear) for _, module in layers):
        return None
    return tuple(f"{name}.weight" for name, _ in layers)


def merged_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights of the model by name, adapters merged, under their names without adapters."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    for name, weight in plain_parameters(model):
        module, _, attribute = name.rpartition(".")
        if module in layers and attribute == "weight":
            change = layers[module].get_delta_weight(ADAPTER).detach()
            change = like(change, weight) if isinstance(change, DTensor) else change
            yield name, merged(weight, change)
        else:
            yield name, weight


def plain_parameters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters except the adapters, under the names that they have without adapters."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            yield name.replace(".base_layer.", "."), parameter.detach()


def adapted_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the adapters and the unmerged weights of the adapted layers, by name. Empty without adapters.

    A checkpoint needs them, since `merged_weights` holds only their sum.
    """
    named = model.named_parameters()
    return {name: value.detach() for name, value in named if ".base_layer." in name or is_adapter(name)}
