"""What is true of every field of a settings class, its annotated type and finite numbers; and of whole numbers."""

import dataclasses
import math
import re
import types
import typing
from numbers import Integral
from typing import Any

from gem_train.errors import ConfigError

__all__ = ["check_fields", "check_whole", "default_of", "kind_of", "without_default"]


def check_fields(config: Any) -> None:
    """Refuses fields of another type than their annotation, and numbers that are not finite.

    Args:
        config: A dataclass instance whose fields are int, float, bool, str, dict or a Literal, or one of them or None.

    Raises:
        TypeError: naming the field, the type and the value.
        ConfigError: if a float is NaN or infinite, or a Literal has another value.
    """
    owner = type(config).__name__
    annotations = typing.get_type_hints(type(config))
    for name in (field.name for field in dataclasses.fields(config)):
        annotation = annotations[name]
        value = getattr(config, name)
        if not any(_is_a(value, member) for member in _members(annotation)):
            error = ConfigError if typing.get_origin(annotation) is typing.Literal else TypeError
            raise error(f"{owner}: `{name}` must be {kind_of(annotation)}, got {value!r}; {default_of(config, name)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(
                f"{owner}: `{name}` must be {kind_of(annotation)}, got {value!r}; {default_of(config, name)}"
            )


def check_whole(owner: str, name: str, value: object, *, minimum: int, remedy: str) -> None:
    """Refuses an argument that is no whole number, or too small.

    Args:
        owner: Of the argument.
        name: Its name.
        value: What was given.
        minimum: The least that it may be.
        remedy: What the error ends with.

    Raises:
        TypeError: if it is no whole number.
        ValueError: if it is below `minimum`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{owner}: `{name}` must be a whole number, got {value!r}; {remedy}")
    if int(value) < minimum:
        raise ValueError(f"{owner}: `{name}` must be >= {minimum}, got {value!r}; {remedy}")


def default_of(config: Any, name: str) -> str:
    """What errors about a field end with.

    Args:
        config: A dataclass instance.
        name: Of the field.
    """
    (default,) = (field.default for field in dataclasses.fields(config) if field.name == name)
    return "give one" if default is dataclasses.MISSING else f"the default is {default!r}"


def without_default(text: str) -> str:
    """An error without what `default_of` said.

    Args:
        text: The error.
    """
    return re.sub(r"; the default is [^;]*$", "", text)


def kind_of(annotation: Any) -> str:
    """What a field takes, in words.

    Args:
        annotation: Of a field: int, float, bool, str, a Literal, a tuple of these, or one of them or None.
    """
    members = _members(annotation)
    if len(members) > 1:
        words = [kind_of(member) for member in sorted(members, key=lambda member: member is types.NoneType)]
        return " or ".join(words)
    if typing.get_origin(annotation) is typing.Literal:
        return f"one of {', '.join(map(str, typing.get_args(annotation)))}"
    if typing.get_origin(annotation) is tuple:
        of = typing.get_args(annotation)
        if len(of) == 2 and of[1] is Ellipsis:
            return f"values separated by commas, each {kind_of(of[0])}"
        return f"{len(of)} values separated by commas"
    if typing.get_origin(annotation) is dict:
        return "values by name"
    words_of = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}
    return "none" if annotation is types.NoneType else words_of.get(annotation, str(annotation))


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if is_union else (annotation,)


def _is_a(value: object, annotation: Any) -> bool:
    if typing.get_origin(annotation) is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(annotation))
    if annotation in (int, float):
        return isinstance(value, (int, annotation)) and not isinstance(value, bool)
    return isinstance(value, typing.get_origin(annotation) or annotation)
