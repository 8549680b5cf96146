"""pydantic's errors about a body or a header, as a problem in JSON's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .problems import ProblemError

MAX_ERRORS = 16
MAX_NAME = 80
"""Characters of a field's name, which a caller chose, that a message repeats."""


def invalid_request_problem(found_errors: Sequence[Mapping[str, Any]]) -> ProblemError:
    """Turn pydantic's errors about a body or a header into a problem."""
    # What follows from a mistake further inside is not told: that one is what to fix.
    outer = {each["loc"][:size] for each in found_errors for size in range(len(each["loc"]))}
    inner = [each for each in found_errors if each["loc"] not in outer]
    errors = [
        {"field": field_path(each["loc"]), "message": _error_message(each)}
        for each in inner[:MAX_ERRORS]
    ]
    said = "; ".join(f"{each['field'] or 'body'}: {each['message']}" for each in errors)
    return ProblemError("invalid-request", said, errors=errors)


def _error_message(error: Mapping[str, Any]) -> str:
    """What is wrong, in JSON's terms."""
    context = error.get("ctx", {})
    match error["type"]:
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
    return ".".join(str(part)[:MAX_NAME] for part in parts)
