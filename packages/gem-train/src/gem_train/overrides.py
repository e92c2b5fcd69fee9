"""Typed `name.field=value` changes to nested frozen dataclasses."""

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from gem_train.checks import kind_of, without_default
from gem_train.errors import ConfigError

__all__ = ["Field", "apply_overrides", "as_text", "field_values", "list_fields", "parse_assignments"]

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


def apply_overrides(config: T, assignments: Mapping[str, object], *, flags: Mapping[str, str] | None = None) -> T:
    """A copy of a dataclass with some fields, named by dotted path, parsed from text by their annotation.

    A tuple of dataclasses is entered by position or by the `name` of its element: `sequences.history.num_layers=2`.

    Args:
        config: A dataclass instance, nested to any depth.
        assignments: Dotted path -> text, or the value itself.
        flags: Dotted path -> the option that the user set it with, for the errors; all others came from --set.

    Returns:
        The changed copy; its `__post_init__` checks run again.

    Raises:
        ConfigError: if a name is unknown (the nearest ones are listed), a field is set under two names, or a text does
            not fit its field's type or rule.
    """
    flags = flags or {}
    changes = [
        _Change(path.split("."), path, text, f"{flags[path]} {text}" if path in flags else f"--set {path}={text}")
        for path, text in ((path, _given(value)) for path, value in assignments.items())
    ]
    changed: T = _apply(config, changes, config)
    return changed


class Field(NamedTuple):
    """A field that can be set."""

    path: str
    """Dotted."""
    value: Any
    takes: str
    """Type or choices, in words."""
    meaning: str
    """The text below the field in its class; empty if there is none."""


def list_fields(config: Any) -> list[Field]:
    """All the fields that can be set, in their order, with what they mean.

    Args:
        config: A dataclass instance, nested to any depth.
    """
    places = list(_walk(config))
    owners = {type(owner) for _, owner, _ in places}
    kinds = {owner: typing.get_type_hints(owner) for owner in owners}
    meanings = {owner: _meanings(owner) for owner in owners}
    return [
        Field(path, getattr(owner, name), kind_of(kinds[type(owner)][name]), meanings[type(owner)].get(name, ""))
        for path, owner, name in places
    ]


def field_values(config: Any) -> dict[str, Any]:
    """Dotted path -> value of all the fields that can be set."""
    return {path: getattr(owner, name) for path, owner, name in _walk(config)}


def _walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Dotted path, owner and name of all the fields that can be set."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        path = prefix + field.name
        if _is_config(value):
            yield from _walk(value, path + ".")
        elif _is_config_tuple(value):
            for index, element in enumerate(value):
                yield from _walk(element, f"{path}.{getattr(element, 'name', index)}.")
        elif not callable(value):
            yield path, config, field.name


def _meanings(owner: type[Any]) -> dict[str, str]:
    """Field -> the text below it, as documentation tools read it; nothing where the source is not at hand."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(tree.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _is_config(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_config_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(_is_config(element) for element in value)


class _Change(NamedTuple):
    keys: list[str]
    """From here on."""
    path: str
    """The whole of it."""
    text: str
    shown: str
    """As the user gave it."""


def _apply(config: Any, changes: list[_Change], root: Any) -> Any:
    """Applies all changes below one object at once, so that fields which must fit together can change together."""
    fields = {field.name for field in dataclasses.fields(config)}
    new: dict[str, Any] = {}
    for key, group in _by_first_key(changes).items():
        if key not in fields:
            raise _unknown(group[0].path, root)
        value = getattr(config, key)
        if _is_config(value):
            new[key] = _apply(value, _inner(group, root), root)
        elif _is_config_tuple(value):
            new[key] = _apply_to_elements(value, _inner(group, root), root)
        else:
            first, *others = group
            if first.keys or callable(value):
                raise _unknown(first.path, root)
            if others:
                raise ConfigError(f"{first.shown} and {others[0].shown} are the same setting; give one of them")
            try:
                new[key] = _parse(first.text, typing.get_type_hints(type(config))[key])
            except ConfigError as error:
                raise ConfigError(f"{first.shown}: `{key}` {error}; the recipe has {as_text(value)}") from None
    try:
        return dataclasses.replace(config, **new)
    except (ValueError, TypeError) as error:
        # What the recipe has is nearer than what the class has.
        rule = without_default(str(error).removeprefix(f"{type(config).__name__}: "))
        blamed = _blamed(changes, rule)
        remedy = ""
        if ";" not in rule:
            have = field_values(root)
            remedy = f"; the recipe has {', '.join(as_text(have.get(change.path)) for change in blamed)}"
        raise ConfigError(f"{' '.join(change.shown for change in blamed)}: {rule}{remedy}") from error


def _blamed(changes: list[_Change], error: str) -> list[_Change]:
    """The changes of the fields that an error names; all of them if it names none."""
    named = set(re.findall(r"`(\w+)`", error))
    return [change for change in changes if change.path.rsplit(".", 1)[-1] in named] or changes


def _apply_to_elements(elements: tuple[Any, ...], changes: list[_Change], root: Any) -> tuple[Any, ...]:
    labels = [str(getattr(element, "name", index)) for index, element in enumerate(elements)]
    # An element has two names; what is set under either goes together.
    groups: dict[int, list[_Change]] = {}
    for key, group in _by_first_key(changes).items():
        index = labels.index(key) if key in labels else int(key) if key.isdecimal() else len(elements)
        if index >= len(elements):
            raise _unknown(group[0].path, root)
        groups.setdefault(index, []).extend(_inner(group, root))
    return tuple(
        _apply(element, groups[index], root) if index in groups else element for index, element in enumerate(elements)
    )


def _by_first_key(changes: list[_Change]) -> dict[str, list[_Change]]:
    """First key -> changes below it, that key taken off."""
    groups: dict[str, list[_Change]] = {}
    for change in changes:
        groups.setdefault(change.keys[0], []).append(change._replace(keys=change.keys[1:]))
    return groups


def _inner(changes: list[_Change], root: Any) -> list[_Change]:
    """The changes, all of which must name something further in."""
    for change in changes:
        if not change.keys:
            raise _unknown(change.path, root)
    return changes


def _unknown(path: str, root: Any) -> ConfigError:
    names = list(field_values(root))
    near = _abbreviated(path, names)
    if not near:
        near = difflib.get_close_matches(path, names, n=4, cutoff=0.5)
        last = path.rsplit(".", 1)[-1]
        near += [name for name in names if name.rsplit(".", 1)[-1] == last and name not in near]
    hint = f"the nearest are {', '.join(near)}" if near else f"the fields are {', '.join(names)}"
    return ConfigError(f"there is no field `{path}`; {hint}")


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


_MOST = 2**63 - 1
"""Numbers of steps, samples and widths go through 64-bit integers."""


def _parse(text: str, annotation: Any) -> Any:
    """A value of the annotated type; unions take the first member that accepts the text."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        for member in sorted(arguments, key=lambda member: member is not types.NoneType):
            try:
                return _parse(text, member)
            except ConfigError:
                continue
        raise _mismatch(text, annotation)
    if annotation is types.NoneType and text.lower() in ("none", "null"):
        return None
    if origin is typing.Literal:
        for choice in arguments:
            if text == str(choice):
                return choice
    if origin is tuple:
        parts = [part.strip() for part in text.strip("()").split(",") if part.strip()]
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(_parse(part, arguments[0]) for part in parts)
        if len(parts) == len(arguments):
            return tuple(_parse(part, argument) for part, argument in zip(parts, arguments, strict=True))
    if annotation is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if annotation is str:
        return text
    if annotation in (int, float):
        try:
            number = annotation(text)
        except ValueError:
            raise _mismatch(text, annotation) from None
        if not math.isfinite(number):
            raise _mismatch(text, annotation)
        if isinstance(number, int) and abs(number) > _MOST:
            raise _refused(f"lie in [-{_MOST}, {_MOST}]", text)
        return number
    raise _mismatch(text, annotation)


def _mismatch(text: str, annotation: Any) -> ConfigError:
    return _refused(f"be {kind_of(annotation)}", repr(text))


def _refused(rule: str, got: str) -> ConfigError:
    """Without the field and the remedy, which the caller knows."""
    return ConfigError(f"must {rule}, got {got}")


def _given(value: object) -> str:
    """A value as --set takes it; text as it is."""
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else as_text(value)


def as_text(value: Any) -> str:
    """A value as errors show it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "nothing"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
