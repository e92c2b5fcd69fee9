"""Errors have four parts: the argument and its rule, the value received, and, after a semicolon, what to do."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KINDS = {"ValueError", "TypeError", "DtypeError", "ConfigError", "IndexError", "NotImplementedError"}
PASSED_ON = 45
"""Characters of text below which a message is that of another error, which has its own remedy, with a prefix."""


def text_of(message: ast.expr) -> tuple[str, str]:
    """Its text with ``{}`` for values, and the names of the values."""
    if isinstance(message, ast.Constant):
        return str(message.value), ""
    if isinstance(message, ast.JoinedStr):
        values = [each for each in message.values if isinstance(each, ast.FormattedValue)]
        text = "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in message.values)
        return text, " ".join(ast.unparse(each.value) for each in values)
    if isinstance(message, ast.BinOp):
        (left, first), (right, second) = text_of(message.left), text_of(message.right)
        return left + right, f"{first} {second}"
    if isinstance(message, ast.IfExp):
        return text_of(message.body)
    return "{}", ast.unparse(message)


def raised(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """(place, kind, text, values) of the messages that a file raises."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            kind = ast.unparse(node.exc.func).rpartition(".")[2]
            if kind in KINDS:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", kind, *text_of(node.exc.args[0])


def lacking(kind: str, text: str, values: str) -> list[str]:
    """The parts that a message lacks."""
    if "must" not in text and len(text) < PASSED_ON and text.endswith("{}"):
        return []
    lacks = [] if ";" in text or "remedy" in values else ["a remedy after a semicolon"]
    # What the command line was given stands at the beginning of its errors.
    if kind != "ConfigError" and "got" not in text and "problem" not in values:
        lacks.append("the value received after 'got'")
    return lacks


@pytest.mark.parametrize("package", sorted(path.name for path in ROOT.glob("packages/*")))
def test_errors_say_what_came_and_what_to_do(package: str) -> None:
    found = [each for path in sorted((ROOT / "packages" / package / "src").rglob("*.py")) for each in raised(path)]
    assert len(found) > 20
    wrong = [f"{place}: {lacks}: {text}" for place, kind, text, names in found if (lacks := lacking(kind, text, names))]
    assert not wrong, "\n".join(wrong)


def test_what_a_message_lacks_is_found() -> None:
    assert lacking("ValueError", "f: `x` must be 1, got {}; pass 1", "x") == []
    assert lacking("ValueError", "f: `x` must be 1, got {}", "x") == ["a remedy after a semicolon"]
    assert lacking("TypeError", "f: `x` must be 1; pass 1", "") == ["the value received after 'got'"]
    assert lacking("ConfigError", "--x {}: {}", "path error") == []
