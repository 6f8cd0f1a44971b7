"""Loading of the configuration: a YAML file and dotted overrides give a `Config`, or one `ConfigError` that names the
key, its place and the nearest valid key."""

from __future__ import annotations

import difflib
import functools
import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from penstock.config.invalid_settings import ConfigError
from penstock.config.run_settings import Config
from penstock.config.secret_settings import VARIABLES, check_no_literal_secrets
from penstock.redaction import redacted

MAX_LEVELS, MAX_VALUES = 100, 100_000
"""Most levels and values of a file. Each alias counts as all that it stands for."""
MAX_NUMBER_LENGTH = 100
"""Most characters of a number. PyYAML's time for a long one grows with the square of its length."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Loader(yaml.SafeLoader):
    """A loader with two changes to YAML 1.1. `3e-4` is a number; YAML 1.1 reads it as text, but a user who writes a
    learning rate means a number. A key that is given twice is an error; YAML 1.1 would keep only the last value.

    All its errors are `yaml.YAMLError`."""

    def construct_document(self, node: yaml.Node) -> Any:
        _check_size(node)
        return super().construct_document(node)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        place = f"the value in line {node.start_mark.line + 1}"
        if node.tag in _NUMBERS and len(node.value) > MAX_NUMBER_LENGTH:
            raise yaml.constructor.ConstructorError(problem=f"{place} has more than {MAX_NUMBER_LENGTH} characters")
        try:
            if isinstance(node, yaml.ScalarNode):
                node.value.encode()  # fails for half a character, which later steps cannot write
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(problem=f"{place} is not a valid {kind}") from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in seen:
                problem = f"{key.value} is given twice, in lines {seen[key.value]} and {line}"
                raise yaml.constructor.ConstructorError(problem=problem)
            seen[key.value] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _check_size(root: yaml.Node) -> None:
    """Raise `yaml.YAMLError` if a document has too many levels or values, or contains itself."""
    waiting, num_values = [(root, 1)], 1
    while waiting:
        node, level = waiting.pop()
        inner = [] if isinstance(node, yaml.ScalarNode) else node.value
        parts = itertools.chain(*inner) if isinstance(node, yaml.MappingNode) else inner
        waiting += [(part, level + 1) for part in parts]
        num_values += len(inner)
        if level > MAX_LEVELS or num_values > MAX_VALUES:
            raise yaml.YAMLError(f"it has more than {MAX_LEVELS} levels or {MAX_VALUES} values, aliases included")


def _load(text: str) -> Any:
    """Return the value of a YAML text. Raises `yaml.YAMLError`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise yaml.YAMLError(f"it has more than {MAX_LEVELS} levels") from None


def check_text(text: str) -> None:
    """Raise `yaml.YAMLError` if a text of others has too many levels, values or digits to be loaded."""
    _load(text)


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the tree of dotted overrides: `["a.b=1"]` -> `{"a": {"b": 1}}`. Values are YAML. A later override changes
    the result of an earlier one. Raises `ConfigError`."""
    tree: dict[str, Any] = {}
    for override in overrides:
        node: Any = tree
        for section in override.partition("=")[0].split(".")[:-1]:
            node = node.get(section, {})
            if not isinstance(node, dict):
                problem = f"goes below {section!r}, which another override sets to a value"
                raise ConfigError(f"override {override!r} {problem}: combine the two")
        tree = merged(tree, _parse_override(override))
    return tree


def _parse_override(override: str) -> dict[str, Any]:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    if key in VARIABLES:
        raise ConfigError(f"{key} on the command line would show in the process list: use {VARIABLES[key]}")
    try:
        value = _load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: {_first_line(error)}") from None
    *sections, leaf = key.split(".")
    tree: dict[str, Any] = {leaf: value}
    for section in reversed(sections):
        tree = {section: tree}
    return tree


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over`. Mappings are merged, but an empty mapping replaces the old one."""
    both = dict(base)
    for key, value in over.items():
        old = both.get(key)
        both[key] = merged(old, value) if value and isinstance(old, dict) and isinstance(value, dict) else value
    return both


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `overrides`, validate. Raises `ConfigError`."""
    path = Path(path)
    return _resolve(_read(path), overrides, path)


def default_config(overrides: Sequence[str]) -> Config:
    """Return the defaults with `overrides` applied. Raises `ConfigError`."""
    return _resolve({}, overrides, Path("the defaults"))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = _load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_first_line(error)}") from None
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold sections (model:, env:, ...), not a {type(document).__name__}")
    return document


def _resolve(document: dict[str, Any], overrides: Sequence[str], path: Path) -> Config:
    changed = parse_overrides(overrides)
    tree = functools.reduce(merged, map(_parse_override, overrides), document)
    check_no_literal_secrets(tree)
    for name, variable in VARIABLES.items():
        section, _, key = name.partition(".")
        if (secret := os.environ.get(variable)) and isinstance(given := tree.get(section, {}), dict):
            tree = {**tree, section: {key: secret, **given}}
    for name in ("env", "validation"):
        if isinstance(settings := tree.get(name), dict):
            tree = {**tree, name: _with_absolute_names(settings, path)}
    try:
        return Config.model_validate(tree)
    except ValidationError as failure:
        lines = [_explain(error, tree, changed, path) for error in failure.errors()]
        raise ConfigError("\n".join(lines)) from None


def _with_absolute_names(section: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a section of environments with absolute paths of environment, manager and reward files, which every
    process of the run can find. A file is looked for beside the configuration, then in the working directory."""
    changed = dict(section)
    for key in ("name", "manager", "reward"):
        file, _, class_name = name.rpartition(":") if isinstance(name := section.get(key), str) else ("", "", "")
        if file.endswith(".py"):
            beside = path.parent / file
            changed[key] = f"{(beside if beside.is_file() else Path(file)).absolute()}:{class_name}"
    if isinstance(mixture := section.get("mixture"), dict):
        changed["mixture"] = {
            tag: _with_absolute_names(each, path) if isinstance(each, dict) else each for tag, each in mixture.items()
        }
    return changed


def _explain(error: Any, tree: dict[str, Any], overrides: dict[str, Any], path: Path) -> str:
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    place = _place(location, tree, overrides, path) or f"in {path}"
    if error["type"] == "extra_forbidden":
        section, known = ".".join(location[:-1]), list(_fields_at(location[:-1]))
        remedy = f"valid keys {'of ' + section if section else 'here'}: {', '.join(known)}"
        if near := difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5):
            remedy = f"did you mean {'.'.join([*location[:-1], near[0]])}?"
        return f"unknown key {key} {place}: {remedy}"
    message = error["msg"].removeprefix("Value error, ")
    if not key or isinstance(error["input"], dict):  # a whole section contradicts itself
        found = [(setting, _place(setting, tree, overrides, path)) for setting in _settings_in(message, location)]
        places = [f"{'.'.join(setting)} {where}" for setting, where in found if where]
        where = f" ({', '.join(places)})" if places else ""
        return f"contradictory settings{' of ' + key if key else ''}: {message}{where}"
    if fields := _fields_at(location):
        return f"bad value for {key} {place}: it is a section; {_leaf_for(error['input'], key, fields)}"
    given = "a secret" if key in VARIABLES else repr(redacted(error["input"], location[-1]))
    return f"bad value for {key} {place}: {message} (got {given})"


def _place(location: Sequence[str], tree: dict[str, Any], overrides: dict[str, Any], path: Path) -> str | None:
    """Return where a setting was given; None if it was not given."""
    if _contains(overrides, location):
        return "on the command line"
    return f"in {path}" if _contains(tree, location) else None


def _settings_in(message: str, section: Sequence[str]) -> list[list[str]]:
    """Return the settings that a message about `section` names, either by full name or relative to the section."""
    found: dict[str, list[str]] = {}
    for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*", message):
        for setting in (word.split("."), [*section, *word.split(".")]):
            if setting[-1] in _fields_at(setting[:-1]) and not _fields_at(setting):
                found[".".join(setting)] = setting
    return list(found.values())


def _leaf_for(value: object, section: str, fields: dict[str, FieldInfo]) -> str:
    """Return a hint for a section that was set to one value: the setting that the value probably belongs to, or the
    section's settings."""
    meant = [name for name, field in fields.items() if value in get_args(field.annotation)]
    keys = ", ".join(f"{section}.{name}" for name in fields)
    return f"did you mean {section}.{meant[0]}={value}?" if meant else f"its settings are {keys}"


def _fields_at(location: Sequence[str]) -> dict[str, FieldInfo]:
    """Return the settings of a section; empty if `location` is not a section."""
    model: type[BaseModel] = Config
    parts = (part for part in location if not part.isdigit())  # skip indexes in a list of sections
    for part in parts:
        field = model.model_fields.get(part)
        is_one = field is not None and get_origin(field.annotation) is not list
        candidates = [field.annotation, *get_args(field.annotation)] if field is not None and is_one else []
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not nested:
            return {}
        model = nested[0]
        if field is not None and get_origin(field.annotation) is dict and next(parts, None) is None:
            return {}
    return model.model_fields


def _contains(tree: Any, location: Sequence[str]) -> bool:
    for part in location:
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return bool(location)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())
