"""Every error a caller can get, as RFC 9457 problems.

`KINDS` lists them all: slug, HTTP status, title. The code that raises an error writes its detail,
which says how to fix it. Slugs that name a state of the worker have status 503 for a request that can't
run now, and 409 for a verb that is out of order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .wire_base import Problem

PREFIX: Final = "urn:rollout:problem:"
MEDIA_TYPE: Final = "application/problem+json"

KINDS: Final[dict[str, tuple[int, str]]] = {
    # The request itself.
    "invalid-request": (422, "The request is invalid"),
    "unsupported": (422, "The engine does not support this"),
    "too-long": (413, "The prompt and max_tokens exceed the maximum length"),
    "body-too-large": (413, "The body is too large"),
    "not-found": (404, "No such route"),
    "method-not-allowed": (405, "The route does not allow this method"),
    "not-json": (415, "The body must be declared as JSON"),
    "body-timeout": (408, "The body took too long to arrive"),
    "http-error": (400, "The request could not be handled"),
    # The caller.
    "unauthenticated": (401, "A valid bearer token is required"),
    "forbidden": (403, "The caller lacks permission"),
    "auth-unavailable": (503, "The caller's permissions can't be checked right now"),
    # Admission of requests.
    "duplicate-request": (409, "The request_id is already in flight"),
    "unknown-media": (409, "The worker does not have these pictures"),
    "version-not-met": (409, "The active weights are not the requested ones"),
    "queue-full": (429, "The queue is full"),
    "fenced": (503, "The worker is fenced"),
    "shutting-down": (503, "The worker is shutting down"),
    # States of the worker.
    "starting": (503, "The worker is starting"),
    "loading": (503, "The engine is loading"),
    "failed": (503, "The engine failed and is being restarted"),
    "pausing": (503, "The worker is pausing"),
    "paused": (503, "The worker is paused"),
    "draining": (503, "The worker is draining"),
    "asleep": (503, "The worker is asleep"),
    "waking": (503, "The worker is waking up"),
    # Verbs.
    "held": (409, "Another caller holds the worker"),
    "stale-generation": (409, "The worker has seen a newer generation"),
    "stale-epoch": (409, "The worker has seen a newer epoch"),
    "version-regressed": (409, "Versions must increase"),
    "content-mismatch": (409, "The identity is bound to different content"),
    "not-staged": (409, "These weights are not staged"),
    "wrong-base": (409, "These weights don't serve here with their bytes"),
    "no-copy": (409, "This worker keeps no copy of these weights"),
    "weights-rejected": (409, "The engine rejected the weights"),
    "engine-refused": (503, "The engine can't do this now"),
    "changed-meanwhile": (409, "Another call changed the outcome"),
    "deadline-exceeded": (504, "The deadline passed"),
    "internal-error": (500, "Internal error in the worker"),
}


class ProblemError(Exception):
    """An error response: a problem body with `facts` as extension members."""

    def __init__(
        self,
        slug: str,
        detail: str,
        *,
        status: int | None = None,
        retry_after: int | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(detail)
        default_status, title = KINDS[slug]
        self.slug = slug
        self.retry_after = retry_after
        self.problem = Problem(
            type=PREFIX + slug,
            title=title,
            status=default_status if status is None else status,
            detail=detail,
            **facts,
        )

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def conflict_problem(slug: str, detail: str, **facts: Any) -> ProblemError:
    """A verb that is out of order: always 409, even for slugs that name a state."""
    return ProblemError(slug, detail, status=409, **facts)


MAX_ERRORS = 16
MAX_NAME = 80
"""Characters of a field's name, which a caller chose, that a message repeats."""


def invalid_request_problem(found_errors: Sequence[Mapping[str, Any]]) -> ProblemError:
    """Turn pydantic's errors about a body or a header into a problem."""
    # An error that follows from one further inside is left out: the inner one is what to fix.
    outer = {each["loc"][:size] for each in found_errors for size in range(len(each["loc"]))}
    inner = [each for each in found_errors if each["loc"] not in outer]
    errors = [
        {"field": _field_path(each["loc"]), "message": _error_message(each)}
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


def _field_path(location: Sequence[int | str]) -> str:
    """`('body', 'sampling', 'top_p')` → `sampling.top_p`, as the client wrote it."""
    parts = location[1:] if location[:1] == ("body",) else location
    return ".".join(str(part)[:MAX_NAME] for part in parts)
