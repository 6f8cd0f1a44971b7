"""Checks of a Hugging Face dataset in a local directory, which reads no files outside of it and no addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from penstock.config import ConfigError
from penstock.config.yaml_file import check_text
from penstock.own_files import link_outside

PLAIN_FEATURES = (
    *("Value", "ClassLabel", "List", "LargeList", "Json", "Translation", "TranslationVariableLanguages"),
    *("Array2D", "Array3D", "Array4D", "Array5D"),
)
"""Types of columns that hold their values. Others (`Image`, `Audio`, ...) may hold the address of a file, which reading
a row would fetch."""

SCHEME = re.compile("[A-Za-z][A-Za-z0-9+.-]*:")
"""How an address begins, also that of a file of this machine (`file:`, `local:`)."""


def is_saved(directory: Path) -> bool:
    """Return whether `save_to_disk` wrote the directory."""
    return (directory / "dataset_info.json").is_file() or (directory / "dataset_dict.json").is_file()


def check_own_files(directory: Path) -> None:
    """Raise `ConfigError` if a link leads out of the directory of a dataset, or if its card, or a file written by
    `save_to_disk`, names files outside of it or web addresses. The card is read as `datasets` reads it."""
    try:
        link = link_outside(directory)
    except OSError as error:
        raise ConfigError(f"data: {directory} cannot be searched: {error}") from None
    if link:
        raise ConfigError(f"data: {link} leads out of the dataset {directory}: replace the link by the file itself")
    for where, named in _named_files(directory):
        if SCHEME.match(named) or "::" in named or named.startswith(("/", "~")) or ".." in Path(named).parts:
            raise ConfigError(f"data: {where} of {directory} names {named!r}, which is not in the directory")


def _named_files(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield the names of files, with where they stand. Raises `ConfigError` if a card cannot be read."""
    from huggingface_hub import DatasetCard
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    try:
        card, alone = directory / "README.md", directory / ".huggingface.yaml"
        if card.is_file() and (block := REGEX_YAML_BLOCK.search(card.read_text())):
            check_text(block.group(2))
        if alone.is_file():
            check_text(alone.read_text())
        settings = DatasetCard.load(card).data.to_dict() if card.is_file() else {}
        settings |= (yaml.safe_load(alone.read_text()) or {}) if alone.is_file() else {}
    except Exception as error:  # whatever the parsers raise
        raise ConfigError(f"data: the dataset card of {directory} cannot be read: {error}") from None
    yield from (("the dataset card", named) for named in _strings(settings.get("configs")))
    for name, key in (("dataset_dict.json", "splits"), ("state.json", "_data_files")):
        for path in directory.rglob(name) if is_saved(directory) else ():
            yield from ((name, named) for named in _strings(_read_object(path).get(key)))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"data: {path} is not a JSON object: {error}") from None


def check_features(path: Path, feature: Any, *, column: str = "") -> None:
    """Raise `ConfigError` if a feature of a dataset does not hold its values."""
    if isinstance(feature, dict):
        for name, each in feature.items():
            check_features(path, each, column=column or name)
    elif isinstance(feature, list):
        check_features(path, feature[0], column=column)
    elif (kind := type(feature).__name__) not in PLAIN_FEATURES:
        raise ConfigError(f"data: column {column} of {path} is of type {kind}, not of plain values: remove it")
    elif (inner := getattr(feature, "feature", None)) is not None:
        check_features(path, inner, column=column)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)
