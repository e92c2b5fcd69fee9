"""Typed `name.field=value` changes to nested frozen dataclasses."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from gem_train.errors import ConfigError

__all__ = ["apply_overrides", "field_values", "parse_assignments"]

T = TypeVar("T")


def parse_assignments(texts: Iterable[str]) -> dict[str, str]:
    """`["a.b=1"]` -> `{"a.b": "1"}`.

    Raises:
        ConfigError: if a text has no `=` or no name, or a name is given twice.
    """
    assignments: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        name = name.strip()
        if not separator or not name:
            raise ConfigError(f"--set: must be NAME=VALUE, got {text!r}; for example trainer.learning_rate=1e-3")
        if name in assignments:
            raise ConfigError(f"--set: `{name}` is given twice; give it once")
        assignments[name] = value.strip()
    return assignments


def apply_overrides(config: T, assignments: Mapping[str, str]) -> T:
    """A copy of a dataclass with some fields, named by dotted path, parsed from text by their annotation.

    A tuple of dataclasses is entered by position or by the `name` of its element: `sequences.history.num_layers=2`.

    Args:
        config: A dataclass instance, nested to any depth.
        assignments: Dotted path -> text.

    Returns:
        The changed copy; its `__post_init__` checks run again.

    Raises:
        ConfigError: if a name is unknown (the nearest ones are listed) or a text does not fit its field's type.
    """
    changed: T = _apply(config, [(path.split("."), path, text) for path, text in assignments.items()], config)
    return changed


def field_values(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted path -> value of all the fields that can be set."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        path = prefix + field.name
        if _is_config(value):
            values |= field_values(value, path + ".")
        elif _is_config_tuple(value):
            for index, element in enumerate(value):
                values |= field_values(element, f"{path}.{getattr(element, 'name', index)}.")
        elif not callable(value):
            values[path] = value
    return values


def _is_config(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_config_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(_is_config(element) for element in value)


Change = tuple[list[str], str, str]
"""Keys from here on, whole path, text."""


def _apply(config: Any, changes: list[Change], root: Any) -> Any:
    """Applies all changes below one object at once, so that fields which must fit together can change together."""
    fields = {field.name for field in dataclasses.fields(config)}
    new: dict[str, Any] = {}
    for key, group in _by_first_key(changes).items():
        if key not in fields:
            raise _unknown(group[0][1], root)
        value = getattr(config, key)
        if _is_config(value):
            new[key] = _apply(value, _inner(group, root), root)
        elif _is_config_tuple(value):
            new[key] = _apply_to_elements(value, _inner(group, root), root)
        else:
            keys, path, text = group[0]
            if keys or callable(value):
                raise _unknown(path, root)
            new[key] = _parse(text, typing.get_type_hints(type(config))[key], path)
    try:
        return dataclasses.replace(config, **new)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        given = " ".join(f"{path}={text}" for _, path, text in changes)
        raise ConfigError(f"--set {given}: {error}") from error


def _apply_to_elements(elements: tuple[Any, ...], changes: list[Change], root: Any) -> tuple[Any, ...]:
    labels = [str(getattr(element, "name", index)) for index, element in enumerate(elements)]
    new = list(elements)
    for key, group in _by_first_key(changes).items():
        index = labels.index(key) if key in labels else int(key) if key.isdecimal() else len(elements)
        if index >= len(elements):
            raise _unknown(group[0][1], root)
        new[index] = _apply(elements[index], _inner(group, root), root)
    return tuple(new)


def _by_first_key(changes: list[Change]) -> dict[str, list[Change]]:
    """First key -> changes below it, that key taken off."""
    groups: dict[str, list[Change]] = {}
    for keys, path, text in changes:
        groups.setdefault(keys[0], []).append((keys[1:], path, text))
    return groups


def _inner(changes: list[Change], root: Any) -> list[Change]:
    """The changes, all of which must name something further in."""
    for keys, path, _ in changes:
        if not keys:
            raise _unknown(path, root)
    return changes


def _unknown(path: str, root: Any) -> ConfigError:
    names = list(field_values(root))
    near = _abbreviated(path, names)
    if not near:
        near = difflib.get_close_matches(path, names, n=4, cutoff=0.5)
        last = path.rsplit(".", 1)[-1]
        near += [name for name in names if name.rsplit(".", 1)[-1] == last and name not in near]
    hint = f"the nearest are {', '.join(near)}" if near else f"the fields are {', '.join(names)}"
    return ConfigError(f"--set: there is no field `{path}`; {hint}")


def _abbreviated(path: str, names: list[str]) -> list[str]:
    """Fields that the last part of a path is short for, by the first letters of words: lr -> learning_rate."""
    section, _, last = path.rpartition(".")
    short = last.replace("_", "").lower()
    if len(short) < 2:
        return []
    initials = {name: "".join(word[:1] for word in name.rpartition(".")[2].split("_")) for name in names}
    near = [name for name in names if short in initials[name]]
    # Those of the section that was named, and those without further words, come first.
    return sorted(near, key=lambda name: (name.rpartition(".")[0] != section, initials[name] != short))[:4]


def _parse(text: str, annotation: Any, path: str) -> Any:
    """A value of the annotated type; unions take the first member that accepts the text."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        members = sorted(arguments, key=lambda member: member is not types.NoneType)
        for member in members:
            try:
                return _parse(text, member, path)
            except ConfigError:
                continue
        raise _mismatch(text, annotation, path)
    if annotation is types.NoneType:
        if text.lower() in ("none", "null"):
            return None
        raise _mismatch(text, annotation, path)
    if origin is typing.Literal:
        for choice in arguments:
            if text == str(choice):
                return choice
        raise ConfigError(f"--set: `{path}` must be one of {', '.join(map(str, arguments))}, got {text!r}")
    if origin is tuple:
        parts = [part.strip() for part in text.strip("()").split(",") if part.strip()]
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_parse(part, arguments[0], path) for part in parts)
        if len(parts) != len(arguments):
            raise ConfigError(f"--set: `{path}` takes {len(arguments)} values separated by commas, got {text!r}")
        return tuple(_parse(part, argument, path) for part, argument in zip(parts, arguments, strict=True))
    if annotation is bool:
        if text.lower() not in ("true", "false"):
            raise _mismatch(text, annotation, path)
        return text.lower() == "true"
    if annotation is str:
        return text
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            raise _mismatch(text, annotation, path) from None
    raise ConfigError(f"--set: `{path}` has type {_type_name(annotation)}, which cannot be given as text")


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _mismatch(text: str, annotation: Any, path: str) -> ConfigError:
    return ConfigError(f"--set: `{path}` takes a value of type {_type_name(annotation)}, got {text!r}")
