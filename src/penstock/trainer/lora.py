"""Low-rank adapters (Hu et al., arXiv 2106.09685) through peft: what is trained is small, what is served is whole."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from penstock.config import ConfigError, LoraConfig

ADAPTER = "default"


def attach(model: PreTrainedModel, config: LoraConfig) -> None:
    """Freeze `model` and put trainable adapters into its linear layers, in place."""
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError:
        raise ConfigError("trainer.lora needs the package peft: pip install 'penstock[lora]'") from None
    targets: Any = config.targets if config.targets == "all-linear" else list(config.targets)
    adapters = PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0)
    model.requires_grad_(False)
    try:
        with warnings.catch_warnings():  # of shared weights, which are refused below
            warnings.simplefilter("ignore", UserWarning)
            inject_adapter_in_model(adapters, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(f"trainer.lora.targets {config.targets}: {error}") from None
    if (name := _shared(model)) is not None:
        raise ConfigError(f"trainer.lora.targets {config.targets}: {name} shares its weights with another layer")


def _shared(model: PreTrainedModel) -> str | None:
    """An adapted layer that cannot be merged, its weights being somebody else's too."""
    named = list(model.named_parameters(remove_duplicate=False))
    owners = Counter(id(parameter) for _, parameter in named)
    for name, parameter in named:
        if ".base_layer." in name and owners[id(parameter)] > 1:
            layer: str = name.partition(".base_layer.")[0]
            return layer
    return None


def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of the model as a whole, under the names they have without adapters."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    merged = {}
    for name, parameter in model.named_parameters():
        module, _, attribute = name.rpartition(".base_layer.")
        if module in layers:
            whole = parameter.detach()
            if attribute == "weight":
                whole = whole + layers[module].get_delta_weight(ADAPTER).detach().to(whole.dtype)
            merged[f"{module}.{attribute}"] = whole
        elif ".lora_" not in name:
            merged[name] = parameter.detach()
    return merged


def adapted_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """What `merged_weights` does not tell apart: adapters and what they are added to. Empty without adapters."""
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if ".base_layer." in name or ".lora_" in name
    }
