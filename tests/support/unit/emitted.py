"""What the operator's code can say: reasons of conditions and events, read from its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

CAMEL = re.compile(r"(?:[A-Z][a-z]+)+")
Scope = ast.FunctionDef | ast.Module
NO_REASON = {"True", "False", "Unknown", "Normal", "Warning"}


def reasons(folder: Path) -> set[str]:
    """Every reason that a condition or an event of the operator can bear."""
    status = ast.parse((folder / "api" / "status.py").read_text())
    found: set[str] = set()
    for file in [*(folder / "core").rglob("*.py"), *(folder / "passes").rglob("*.py")]:
        tree = ast.parse(file.read_text())
        scopes: list[Scope] = [n for n in ast.walk(tree) if isinstance(n, Scope)]
        found |= {reason for scope in scopes for reason in _of_scope(scope)}
    # WeightsSynced says the phase of the update, Ready the state that keeps it from serving.
    found |= _values(status, "UpdatePhase") & {"Staging", "Committing"}
    found |= _values(ast.parse((folder / "api" / "spec.py").read_text()), "DesiredState") - {
        "Active"
    }
    return found - NO_REASON


def _of_scope(function: Scope) -> Iterator[str]:
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Name(id="Finding" | "EventNote"), args=[_, reason, *_]):
                yield from _texts(reason, function)
            case ast.Call(func=ast.Name(id="PlacementProblem" | "_check_texts"), args=[reason, *_]):
                yield from _texts(reason, function)
            case ast.Return(value=ast.Tuple(elts=[_, reason, _])):
                yield from _texts(reason, function)
            case ast.Tuple(elts=[ast.Constant(value="Normal" | "Warning"), reason, *_]):
                yield from _texts(reason, function)
            case (
                ast.keyword(arg="reason", value=reason)
                | ast.Call(func=ast.Attribute(attr="record_event"), args=[_, _, reason, *_])
            ):
                yield from _texts(reason, function)
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "reason":
                        yield from _texts(value, function)


def _texts(node: ast.expr, function: Scope) -> Iterator[str]:
    """The CamelCase words that an expression can be."""
    match node:
        case ast.Constant(value=str(text)) if CAMEL.fullmatch(text):
            yield text
        case ast.IfExp(body=body, orelse=orelse):
            yield from _texts(body, function)
            yield from _texts(orelse, function)
        case ast.Name(id=name):
            for value in _assigned(name, function):
                yield from _texts(value, function)
        case ast.JoinedStr(values=[ast.FormattedValue(value=first), ast.Constant(value=str(tail))]):
            for head in _texts(first, function):
                yield f"{head}{tail}"


def _assigned(name: str, function: Scope) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            yield node.value


def _values(tree: ast.Module, name: str) -> set[str]:
    """Values of an enum."""
    classes = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    assigned = (n.value for c in classes for n in c.body if isinstance(n, ast.Assign))
    return {str(v.value) for v in assigned if isinstance(v, ast.Constant)}
