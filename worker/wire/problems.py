"""Every error that a caller can get, as RFC 9457 problems.

`KINDS` is the whole list: slug, HTTP status, title. The detail is written where the error is raised
and says what to do. Some slugs name a state of the worker: a 503 where a request can't run now, a
409 where a verb comes in the wrong order.
"""

from __future__ import annotations

from typing import Any, Final

from .base import Problem

PREFIX: Final = "urn:rollout:problem:"
MEDIA_TYPE: Final = "application/problem+json"

KINDS: Final[dict[str, tuple[int, str]]] = {
    # The request itself.
    "invalid-request": (422, "The request has bad values"),
    "unsupported": (422, "The engine can't do this"),
    "too-long": (413, "The prompt and max_tokens do not fit"),
    "body-too-large": (413, "The body is too large"),
    "not-found": (404, "No such route"),
    "method-not-allowed": (405, "The route has another method"),
    "http-error": (400, "The request can't be handled"),
    # Who asks.
    "unauthenticated": (401, "A valid bearer token is needed"),
    "forbidden": (403, "The caller may not do this"),
    "auth-unavailable": (503, "The caller's rights can't be checked now"),
    # Admission of requests.
    "duplicate-request": (409, "The request_id is in flight"),
    "version-not-met": (409, "Other weights are active"),
    "queue-full": (429, "The queue is full"),
    "fenced": (503, "The weights are below the required ones"),
    "shutting-down": (503, "The worker shuts down"),
    # States of the worker.
    "starting": (503, "The worker starts"),
    "loading": (503, "The engine loads"),
    "failed": (503, "The engine failed and is restarted"),
    "pausing": (503, "The worker is being paused"),
    "paused": (503, "The worker is paused"),
    "draining": (503, "The worker drains"),
    "asleep": (503, "The worker is asleep"),
    "waking": (503, "The worker wakes up"),
    # Verbs.
    "held": (409, "Others hold the worker"),
    "stale-generation": (409, "A newer generation was seen"),
    "stale-epoch": (409, "A newer epoch was seen"),
    "version-regressed": (409, "Versions only rise"),
    "content-mismatch": (409, "The identity is bound to other content"),
    "not-staged": (409, "These weights are not staged"),
    "weights-rejected": (409, "The bytes are not weights of this model"),
    "changed-meanwhile": (409, "Another call changed the outcome"),
    "deadline-exceeded": (504, "The deadline passed"),
    "internal-error": (500, "The worker has a defect"),
}


class ProblemError(Exception):
    """An answer that is not a success; becomes a problem body with `facts` as extensions."""

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
        """Headers that belong to the answer."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def conflict(slug: str, detail: str, **facts: Any) -> ProblemError:
    """A verb in the wrong order: always 409, also for slugs that name a state."""
    return ProblemError(slug, detail, status=409, **facts)


def too_large() -> ProblemError:
    """The problem of a body beyond the limit."""
    return ProblemError(
        "body-too-large",
        "send less: prompts of millions of tokens and control bodies above 1 MiB are mistakes",
    )
