"""The settings of a run beside their defaults and help texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from penstock.config import Config
from penstock.redaction import redacted

Row = dict[str, Any]


def settings_table(settings: Mapping[str, Any]) -> list[Row]:
    """Return a row for each written setting, those that differ from their default first. A setting that this version
    does not know has neither default nor help text."""
    rows = list(_rows(redacted(settings), Config, ""))
    return sorted(rows, key=lambda row: row["is_default"])


def _rows(settings: Mapping[str, Any], model: type[BaseModel] | None, prefix: str) -> Iterator[Row]:
    fields = model.model_fields if model is not None else {}
    for key, value in settings.items():
        field, name = fields.get(key), f"{prefix}{key}"
        below = _model_of(field)
        if isinstance(value, Mapping) and value and (below is not None or field is None):
            yield from _rows(value, below, f"{name}.")
            continue
        default = _default(field)
        yield {
            "name": name,
            "value": value,
            "default": default,
            "is_default": field is not None and value == default,
            "about": " ".join((field.description or "").split()) if field is not None else "",
        }


def _model_of(field: FieldInfo | None) -> type[BaseModel] | None:
    """Return the section that a field holds; None if it holds a value."""
    if field is None:
        return None
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _default(field: FieldInfo | None) -> Any:
    """Return the default as a plain value; None if the field has none."""
    if field is None or field.is_required():
        return None
    return to_jsonable_python(field.get_default(call_default_factory=True, validated_data={}), by_alias=True)
