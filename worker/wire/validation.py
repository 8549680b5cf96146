"""pydantic's errors about a body or a header, as a problem in JSON's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .problems import ProblemError

MAX_ERRORS = 16


def invalid_request(found_errors: Sequence[Mapping[str, Any]]) -> ProblemError:
    """Turn pydantic's errors about a body or a header into a problem."""
    found = [(_location(each), each) for each in found_errors]
    # A list that lost its bad items is also reported as too short: the item is what to fix.
    inner = [(loc, each) for loc, each in found if not any(_below(o, loc) for o, _ in found)]
    errors = [
        {"field": field_path(loc), "message": _message(each)} for loc, each in inner[:MAX_ERRORS]
    ]
    said = "; ".join(f"{each['field'] or 'body'}: {each['message']}" for each in errors)
    return ProblemError("invalid-request", said, errors=errors)


def _location(error: Mapping[str, Any]) -> tuple[int | str, ...]:
    # For malformed JSON, pydantic's location is a character offset, not a field.
    return () if error["type"] == "json_invalid" else tuple(error["loc"])


def _below(location: tuple[int | str, ...], other: tuple[int | str, ...]) -> bool:
    return len(location) > len(other) and location[: len(other)] == other


def _message(error: Mapping[str, Any]) -> str:
    """What is wrong, in JSON's terms."""
    context = error.get("ctx", {})
    match error["type"]:
        case "json_invalid":
            return f"invalid JSON at character {error['loc'][-1]}: {context['error']}"
        case "tuple_type":
            return "must be a list"
        case "dict_type" | "model_type" | "model_attributes_type" | "mapping_type":
            return "must be an object"
        case "extra_forbidden":
            return "unknown field: correct its name or remove it; /openapi.json lists all fields"
        case "too_short":
            return f"needs at least {context['min_length']} item(s)"
        case "value_error":
            return str(context["error"])
    return str(error["msg"])


def field_path(location: Sequence[int | str]) -> str:
    """`('body', 'sampling', 'top_p')` → `sampling.top_p`, as the client wrote it."""
    parts = location[1:] if location[:1] == ("body",) else location
    return ".".join(str(part) for part in parts)
