"""Typed `name.field=value` changes to nested frozen dataclasses."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from gem_train.errors import ConfigError

__all__ = ["apply_overrides", "field_names", "parse_assignments"]

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
    for path, text in assignments.items():
        config = _set(config, path.split("."), text, path, config)
    return config


def field_names(config: Any, prefix: str = "") -> list[str]:
    """Dotted paths of all the fields that can be set."""
    names: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        path = prefix + field.name
        if _is_config(value):
            names += field_names(value, path + ".")
        elif _is_config_tuple(value):
            for index, element in enumerate(value):
                names += field_names(element, f"{path}.{getattr(element, 'name', index)}.")
        elif not callable(value):
            names.append(path)
    return names


def _is_config(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_config_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(_is_config(element) for element in value)


def _set(config: Any, keys: list[str], text: str, path: str, root: Any) -> Any:
    key, rest = keys[0], keys[1:]
    fields = {field.name for field in dataclasses.fields(config)}
    if key not in fields:
        raise _unknown(path, root)
    value = getattr(config, key)
    new: Any
    if rest and _is_config(value):
        new = _set(value, rest, text, path, root)
    elif len(rest) > 1 and _is_config_tuple(value):
        labels = [str(getattr(element, "name", index)) for index, element in enumerate(value)]
        index = labels.index(rest[0]) if rest[0] in labels else int(rest[0]) if rest[0].isdecimal() else len(value)
        if index >= len(value):
            raise _unknown(path, root)
        new = (*value[:index], _set(value[index], rest[1:], text, path, root), *value[index + 1 :])
    elif rest or _is_config(value) or _is_config_tuple(value) or callable(value):
        raise _unknown(path, root)
    else:
        new = _parse(text, typing.get_type_hints(type(config))[key], path)
    try:
        return dataclasses.replace(config, **{key: new})
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--set {path}={text}: {error}") from error


def _unknown(path: str, root: Any) -> ConfigError:
    names = field_names(root)
    near = difflib.get_close_matches(path, names, n=4, cutoff=0.5)
    last = path.rsplit(".", 1)[-1]
    near += [name for name in names if name.rsplit(".", 1)[-1] == last and name not in near]
    hint = f"the nearest are {', '.join(near)}" if near else f"the fields are {', '.join(names)}"
    return ConfigError(f"--set: there is no field `{path}`; {hint}")


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
