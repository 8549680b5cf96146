"""What can go wrong between us and the API server.

KubeError(status, reason, message)
├── NotFound        404: gone, or the CRD is not installed
├── Conflict        409: somebody else changed the object, or it has another uid
├── AlreadyExists   409 with that reason: the name is taken
├── Gone            410: the version of a list or a watch is too old; list again
├── Invalid         422, 400: the object itself is wrong; a plain retry can't help
├── Forbidden       403: a permission is missing
├── Unauthorized    401: the credentials are not, or no longer, accepted
│   └── LoginFailed     not sent: no credentials can be used
├── Unavailable     429, 5xx, no connection, no answer in time: try again later
└── FencedError     not sent: this process does not hold the Lease
"""

from __future__ import annotations

import json


class KubeError(Exception):
    """A request that failed.

    Attributes:
        status: HTTP status; 0 if nothing answered.
        reason: The API server's CamelCase reason, or ours.
        message: The request and what happened to it, in one sentence.
        retry_after: Seconds that the server asked to wait, if it did.
        said: The message without the request: what the server itself said.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        retry_after: float | None = None,
        said: str = "",
    ) -> None:
        super().__init__(f"{reason}: {message}" if reason else message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        self.said = said or message


class NotFound(KubeError):
    """404."""


class Conflict(KubeError):
    """409: stale resourceVersion, or another uid than the precondition's."""

    @classmethod
    def from_error(cls, error: KubeError) -> Conflict:
        """Return another error as a conflict: the API server calls some patches of a replaced object invalid."""
        return cls(error.status, error.reason, error.message, said=error.said)


class AlreadyExists(KubeError):
    """409: an object of that name exists."""


class Gone(KubeError):
    """410: the continuation of a list has expired."""


class Invalid(KubeError):
    """422 or 400: the object was refused for what it says."""


class Forbidden(KubeError):
    """403."""


class Unauthorized(KubeError):
    """401."""


class LoginFailed(Unauthorized):
    """No credentials can be used; the message says what to provide."""

    def __init__(self, message: str) -> None:
        super().__init__(0, "LoginFailed", message)


class Unavailable(KubeError):
    """The API server can't answer now."""


class FencedError(KubeError):
    """A write that was not sent, because this process may not write."""

    def __init__(self, what: str) -> None:
        super().__init__(0, "Fenced", f"{what} was not sent: this operator does not hold the Lease")


_ERROR_BY_STATUS: dict[int, type[KubeError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: Unavailable,
}


def from_answer(status: int, body: bytes, what: str, retry_after: str | None) -> KubeError:
    """Return the error for an answer of 4xx or 5xx to what was asked.

    The body is a `Status` object, or whatever a proxy in between sent.
    """
    try:
        answer = json.loads(body)
    except ValueError:
        answer = {}
    answer = answer if isinstance(answer, dict) else {}
    reason = str(answer.get("reason") or "")
    message = str(answer.get("message") or body[:256].decode(errors="replace").strip())
    message = message or f"HTTP {status}"
    kind = _ERROR_BY_STATUS.get(status, Unavailable if status >= 500 else KubeError)
    if status == 409 and reason == "AlreadyExists":
        kind = AlreadyExists
    seconds = float(retry_after) if retry_after and retry_after.isdecimal() else None
    text = f"{what}: {message}"
    return kind(status, reason or f"HTTP{status}", text, retry_after=seconds, said=message)
