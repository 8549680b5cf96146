"""A request's body as a model: bounded before it is parsed, and parsed in steps if it is long.

Work in C holds Python's lock until it returns, in a thread as well. So whatever grows with a body is
either bounded or done in steps, between which the event loop gets its turn.
"""

from __future__ import annotations

import json
import json.scanner
import re
from collections.abc import Iterable
from dataclasses import dataclass
from json.scanner import py_make_scanner  # type: ignore[attr-defined]  # typeshed knows only C's
from types import FunctionType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from .problems import ProblemError, too_large_problem
from .validation import invalid_request_problem

MIB = 2**20
STEPWISE_BYTES = MIB // 2
"""A longer body is parsed value by value: C would hold Python's lock for over 20 ms."""
MAX_DEPTH = 100
"""Levels of nesting; pydantic and templates end at about 250."""

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a body may be at most: bytes, and JSON values, each of which takes up to 64 bytes.

    Those that the garbage collector looks at are dearer: it holds the lock for all of the process.
    """

    size: int
    values: int
    parts: int
    """Lists and objects, and fields of objects: each of the two."""


CONTROL_LIMITS = BodyLimits(MIB, 2**17, 2**14)


def data_body_limits(max_length: int) -> BodyLimits:
    """What a prompt of `max_length` tokens needs, and a fixed part for text and several prompts."""
    return BodyLimits(
        size=8 * MIB + 16 * max_length,
        values=2**19 + 2 * max_length,
        # JSON as text of a message has about as many braces and colons.
        parts=2**16 + max_length // 8,
    )


NUMBER = re.compile(r"(-?(?:0|[1-9]\d{0,4300}))(\.\d{1,4300})?([eE][-+]?\d{1,10})?")
"""A number as JSON writes it, up to one digit more than Python makes an integer of."""

_bounded_scanner = FunctionType(
    py_make_scanner.__code__, {**vars(json.scanner), "NUMBER_RE": NUMBER}
)
"""The scanner of the standard library; its own pattern matches millions of digits in one call of C."""


class _StepwiseDecoder(json.JSONDecoder):
    """The standard library's own parser without its accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.scan_once = _bounded_scanner(self)


def parse_body(model: type[M], body: bytes, limits: BodyLimits) -> M:
    """Return a body as a model.

    Raises:
        ProblemError: 413 or 422, which names the first fields at fault.
    """
    opened = _check_values(body, limits)
    try:
        long = len(body) > STEPWISE_BYTES
        value = json.loads(body, cls=_StepwiseDecoder) if long else json.loads(body)
    except json.JSONDecodeError as error:
        raise _bad_body(f"invalid JSON at character {error.pos}: {error.msg}") from None
    except UnicodeDecodeError:
        raise _bad_body("not valid UTF-8 JSON") from None
    except ValueError:
        raise _bad_body("a number has too many digits") from None
    except RecursionError:
        raise _too_deep_problem() from None
    if opened > MAX_DEPTH and _fits_level([value], MAX_DEPTH):
        raise _too_deep_problem()
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_request_problem(
            error.errors(include_url=False, include_input=False)
        ) from None


def _check_values(body: bytes, limits: BodyLimits) -> int:
    """Refuse too many values before any of them exists; returns how many lists and objects begin.

    A value begins a list or an object, or follows a comma; a field has two quotes and a colon. What a
    text has of these counts, too.
    """
    commas = opened = quotes = colons = 0
    for start in range(0, len(body), MIB):
        piece = body[start : start + MIB]
        commas += piece.count(b",")
        opened += piece.count(b"[") + piece.count(b"{")
        quotes += piece.count(b'"')
        colons += piece.count(b":")
        if commas + opened > limits.values:
            raise too_large_problem(f"more than {limits.values} values")
        if max(opened, min(quotes // 2, colons)) > limits.parts:
            raise too_large_problem(f"more than {limits.parts} lists and objects, or fields")
    return opened


def _fits_level(level: Iterable[Any], most: int) -> bool:
    for _ in range(most):
        level = [value for each in level for value in _nested_values(each)]
        if not level:
            return False
    return True


def _nested_values(value: Any) -> Iterable[Any]:
    values = value.values() if isinstance(value, dict) else value
    return [each for each in values if isinstance(each, list | dict)]


def _too_deep_problem() -> ProblemError:
    return _bad_body(f"nested more than {MAX_DEPTH} levels deep")


def _bad_body(detail: str) -> ProblemError:
    said = f"body: {detail}"
    return ProblemError("invalid-request", said, errors=[{"field": "", "message": detail}])
