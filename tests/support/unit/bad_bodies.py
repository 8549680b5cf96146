"""Bodies that no client should send: huge, deep, of wrong types, in every field of every route.

The fields are those of a port's own OpenAPI document, so a new one is found without being named here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

GOOD: dict[str, dict[str, Any]] = {
    "/v1/generate": {"token_ids": [5], "sampling": {"max_tokens": 1}},
    "/v1/completions": {"prompt": [5], "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/abort": {"request_ids": ["none"]},
    "/v1/weights/stage": {"epoch": 1, "version": 1},
    "/v1/weights/commit": {"epoch": 1, "version": 1},
    "/v1/weights/discard": {"epoch": 1, "version": 1},
    "/v1/require": {"epoch": 1},
}
"""Where something is required."""


def _list(element: str) -> Callable[[int], str]:
    return lambda size: "[" + ",".join([element] * max(1, size // (len(element) + 1))) + "]"


def _mapping(value: str) -> Callable[[int], str]:
    def make(size: int) -> str:
        return "{" + ",".join(f'"{n}":{value}' for n in range(max(1, size // 12))) + "}"

    return make


def _deep(before: str, after: str) -> Callable[[int], str]:
    return lambda size: before * (size // len(before)) + after * (size // len(before))


FILLS: dict[str, Callable[[int], str]] = {
    "integers": _list("7"),
    "floats": _list("0.5"),
    "texts": _list('"a"'),
    "nothings": _list("null"),
    "objects": _list("{}"),
    "lists": _list("[]"),
    "lists of lists": _list("[[[[]]]]"),
    "messages": _list('{"role":"user","content":[{"type":"text","text":"a"}]}'),
    "numbers as keys": _mapping("0.5"),
    "texts at keys": _mapping('"a"'),
    "objects at keys": _mapping("{}"),
    "deep lists": _deep("[", "]"),
    "deep objects": lambda size: '{"a":' * (size // 5) + "1" + "}" * (size // 5),
    "tens of levels": lambda size: _list('{"a":' * 90 + "1" + "}" * 90)(size),
    "one long text": lambda size: '"' + "a" * size + '"',
    "commas": lambda size: '"' + "," * size + '"',
    "escapes": lambda size: '"' + "\\u00e9" * (size // 6) + '"',
    "half characters": _list('"\\ud800"'),
    "long integers": _list("7" * 4000),
    "one long integer": lambda size: "7" * size,
    "one long fraction": lambda size: "0." + "7" * size,
    "not a number": lambda size: "NaN",
    "a late mistake": lambda size: "[" + "7," * (size // 2) + "0.5]",
    "half of it": lambda size: "[" + "7," * (size // 2),
}


@dataclass(frozen=True)
class BadBody:
    """One body for one route."""

    path: str
    field: tuple[str, ...]
    fill: str
    size: int

    @property
    def content(self) -> bytes:
        """The body: a good one, but for its last field."""
        good = GOOD.get(self.path, {})
        start = _open_object(good)
        inner = FILLS[self.fill](self.size)
        for name in reversed(self.field[1:]):
            # What else is in a good field stays, such as the few tokens of a request that is not bad after all.
            beside = good.get(self.field[0], {}) if name == self.field[1] else {}
            inner = f'{_open_object(beside)}"{name}":{inner}}}'
        return f'{start}"{self.field[0]}":{inner}}}'.encode()


def unknown_fields(path: str, size: int) -> bytes:
    """A good body with very many unknown fields."""
    return (_open_object(GOOD.get(path, {})) + _mapping("1")(size)[1:]).encode()


def _open_object(fields: object) -> str:
    """Return the beginning of a JSON object with these fields, to which others can be added."""
    begun = json.dumps(fields)[:-1]
    return begun if begun == "{" else begun + ","


def paths(document: dict[str, Any]) -> list[str]:
    """The routes that take a body."""
    return [path for path, methods in document["paths"].items() if "post" in methods]


def fields(document: dict[str, Any], path: str) -> list[tuple[str, ...]]:
    """The fields of a route's body, nested ones too."""
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return list(_fields(document, content["schema"], ()))


def _fields(
    document: dict[str, Any], schema: dict[str, Any], above: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    for option in (schema, *schema.get("anyOf", ()), *schema.get("allOf", ())):
        if "$ref" in option:
            name = option["$ref"].rpartition("/")[2]
            yield from _fields(document, document["components"]["schemas"][name], above)
        for name, below in option.get("properties", {}).items():
            yield (*above, name)
            yield from _fields(document, below, (*above, name))


def drawn(document: dict[str, Any], seed: int, size: int) -> BadBody:
    """One of all these bodies."""
    chance = random.Random(seed)
    path = chance.choice(paths(document))
    field = chance.choice([*fields(document, path), ("unknown",)])
    return BadBody(path, field, chance.choice(list(FILLS)), size)
