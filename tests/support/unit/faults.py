"""What the API server may answer to a write instead of doing it, and what the operator must say then."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from tests.support.loopback import Answer

ROUTINE = (404, 409)
"""What is gone or was changed meanwhile, which the watch will show; if not, a webhook says so."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An answer; status 0: the connection ends without one."""

    status: int
    reason: str = ""

    @property
    def name(self) -> str:
        """For the test's name."""
        return str(self.status or "reset")

    @property
    def told(self) -> str:
        """Reason of the condition Degraded, of the event, and of the metric."""
        busy = self.status in (0, 401, 429) or self.status >= 500
        return "ApiError" if busy else "Rejected"

    def answer(self) -> Answer:
        """Return what does it to each request, as an admission webhook or the API server would."""

        async def reply(request: web.Request) -> web.StreamResponse:
            if self.status == 0:
                assert request.transport is not None
                request.transport.abort()
            text = {"kind": "Status", "reason": self.reason, "message": "denied by a policy"}
            return web.json_response(text, status=self.status or 200)

        return reply


FAULTS = (
    Fault(400, "BadRequest"), Fault(401, "Unauthorized"), Fault(403, "Forbidden"),
    Fault(404, "NotFound"), Fault(409, "Conflict"), Fault(413, "RequestEntityTooLarge"),
    Fault(422, "Invalid"), Fault(429, "TooManyRequests"), Fault(500, "InternalError"),
    Fault(503, "ServiceUnavailable"), Fault(504, "Timeout"), Fault(0),
)  # fmt: skip
