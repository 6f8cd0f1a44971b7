"""Files of a model directory, with one clear error when a file is missing. Importable without torch."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from penstock.own_files import lies_inside, link_outside
from penstock.routed_experts import Routing

Value = TypeVar("Value")
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Files that a model directory needs besides the weights."""
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k", "top_k_experts")
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that architectures give the number of experts of a layer."""


MAX_LABELS = 100_000
"""Transformers makes a name for each label of a configuration."""

MAX_HEADER_BYTES = 100_000_000
"""Longest header of a safetensors file, as the format has it."""
AGAIN = "copy or download it again, or let save_pretrained write it"


class ModelError(RuntimeError):
    """A model directory cannot be used. The message names the directory and its fault."""

    self_explanatory = True


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in `directory/name`. Raises `ModelError` if it is missing or no JSON object."""
    path = directory / name
    if not directory.is_dir():
        raise ModelError(f"model directory {directory} does not exist")
    if not path.is_file():
        raise ModelError(f"model directory {directory} has no {name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}): {AGAIN}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds {type(value).__name__}, expected a JSON object: {AGAIN}")
    return value


def read_json_if_present(directory: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in `directory/name`; an empty one if the file is absent."""
    return read_json(directory, name) if (directory / name).is_file() else {}


def vocab_size(directory: Path) -> int | None:
    """Return the number of tokens that the model has embeddings for; None if config.json does not say."""
    return _number(directory, "vocab_size")


def max_positions(directory: Path) -> int | None:
    """Return the longest context that the model was made for, in tokens, with an extension that config.json sets. None
    if it does not say."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    longest = next((found for name in names if (found := _number(directory, name)) is not None), None)
    extension = _value(directory, "rope_scaling", dict) or _value(directory, "rope_parameters", dict) or {}
    factor = extension.get("factor")
    if longest is None or not isinstance(factor, int | float):
        return longest
    original = extension.get("original_max_position_embeddings")
    return max(longest, int((original if isinstance(original, int) else longest) * factor))


def routing(directory: Path) -> Routing | None:
    """Return what the record of a model's routers looks like; None if it has no experts, or does not say."""
    experts, layers = num_experts(directory), _number(directory, "num_hidden_layers")
    chosen = next((found for name in EXPERTS_PER_TOKEN if (found := _number(directory, name))), None)
    return Routing(experts, layers, chosen) if experts and chosen and layers else None


def attention_heads(directory: Path) -> tuple[int, int] | None:
    """Return the number of a model's attention heads, and of those of keys and values. None if it does not say."""
    heads = next((found for name in ("num_attention_heads", "n_head") if (found := _number(directory, name))), None)
    return None if heads is None else (heads, _number(directory, "num_key_value_heads") or heads)


def num_experts(directory: Path) -> int:
    """Return the number of experts of a layer, as config.json says. 0 if the model has none."""
    return next((found for name in NUM_EXPERTS if (found := _number(directory, name))), 0)


def _number(directory: Path, name: str) -> int | None:
    return _value(directory, name, int)


def _value(directory: Path, name: str, kind: type[Value]) -> Value | None:
    """Return a value of config.json, or of its part about text, if it has this type."""
    config = read_json(directory, "config.json")
    parts = (config, config.get("text_config"))
    return next((part[name] for part in parts if isinstance(part, dict) and type(part.get(name)) is kind), None)


def check_links(directory: Path) -> None:
    """Check that no link leads out of a model directory: what it leads to could get into checkpoints. Weights are not
    copied, and may be links. Raises `ModelError`."""
    try:
        link = link_outside(directory, but=".safetensors")
    except FileNotFoundError:
        raise ModelError(f"model directory {directory} does not exist") from None
    except OSError as error:
        raise ModelError(f"model directory {directory} cannot be searched: {error}") from None
    if link:
        raise ModelError(f"{link} leads out of the model directory {directory}: replace the link by the file itself")


def check_no_code(directory: Path) -> None:
    """Check that loading the model runs no code that the model directory holds or names, and reads no file outside of
    it. Raises `ModelError`."""
    check_links(directory)
    config = read_json(directory, "config.json")
    for part in (config, config.get("text_config")):
        labels = part.get("num_labels") if isinstance(part, dict) else None
        if labels is not None and (type(labels) is not int or not 0 <= labels <= MAX_LABELS):
            where = directory / "config.json"
            raise ModelError(f"{where}: num_labels is {labels!r}: remove it, a policy has no labels")
    remedy = "Penstock runs only the code of Transformers: use a model with an architecture that Transformers knows"
    for setting, value in _attention_kernels(config):
        if not isinstance(value, str):
            raise ModelError(f"{directory / 'config.json'}: {setting} is no name, but {value!r}: correct or remove it")
        if "/" in value:
            raise ModelError(f"config.json of model directory {directory} names code to download ({value}); {remedy}")
    if not isinstance(named := config.get("auto_map") or {}, dict):
        raise ModelError(f"{directory / 'config.json'}: auto_map is no object, but {named!r}: remove it")
    if "AutoConfig" in named or "AutoModelForCausalLM" in named:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if config.get("model_type") not in CONFIG_MAPPING:
            code = ", ".join(sorted({str(each).partition(".")[0] + ".py" for each in named.values()}))
            raise ModelError(f"model directory {directory} needs Python code of its own ({code}); {remedy}")
    if (directory / "adapter_config.json").is_file():
        raise ModelError(
            f"model directory {directory} holds an adapter for another model: merge the two, and save them"
        )


def _attention_kernels(config: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the settings of a configuration, and of its parts, that name attention kernels, with each name."""
    for key, value in config.items():
        if key.endswith("attn_implementation") and value is not None:
            yield from ((key, each) for each in (value.values() if isinstance(value, Mapping) else [value]))
        elif isinstance(value, Mapping):
            yield from _attention_kernels(value)


def has_weights(directory: Path) -> bool:
    """Return whether `directory` holds weights, not only an architecture."""
    return bool(_weights_files(directory))


def _weights_files(directory: Path) -> list[Path]:
    """Return the weights files of one format: safetensors if present, else pytorch_model*.bin."""
    return sorted(directory.glob("*.safetensors")) or sorted(directory.glob("pytorch_model*.bin"))


def num_parameters(directory: Path) -> int:
    """Return the number of values in the weights of `directory`, or fewer: of files that are not safetensors, a quarter
    of the bytes. Raises `ModelError` if a file cannot be read."""
    index = read_json_if_present(directory, "model.safetensors.index.json").get("weight_map")
    named = set(index.values()) if isinstance(index, dict) else {"model.safetensors"}
    files = [path for path in _weights_files(directory) if path.name in named] or _weights_files(directory)
    return sum(map(_num_values, files))


def _num_values(path: Path) -> int:
    try:
        if path.suffix != ".safetensors":
            return path.stat().st_size // 4
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: Any = json.loads(file.read(size)) if size <= MAX_HEADER_BYTES else None
        shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
        if not all(isinstance(size, int) and size >= 0 for shape in shapes for size in shape):
            raise ValueError("a shape that no tensor has")
        return sum(map(math.prod, shapes))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ModelError(f"{path} is no safetensors file, or cannot be read ({error}): {AGAIN}") from None


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, templates and configuration from `source`. Files already in `target` are kept. Raises
    `ModelError` if a link leads out of `source`."""
    check_links(source)
    for name in COMPANIONS:
        if (source / name).is_file() and not (target / name).exists():
            with (source / name).open("rb") as file:
                opened = Path(os.path.realpath(f"/proc/self/fd/{file.fileno()}"))
                if not lies_inside(opened, source):  # the file became a link after the check
                    raise ModelError(f"{source / name} leads out of the model directory {source}")
                with (target / name).open("wb") as copy:
                    shutil.copyfileobj(file, copy)
