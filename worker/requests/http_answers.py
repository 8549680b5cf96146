"""The HTTP side of an answer in pieces: a client that reads too slowly, and errors after the status line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence

from fastapi.responses import StreamingResponse
from starlette.types import Message, Send
from typing_extensions import override

from rollout_common.wire.event_frames import STREAM_COMMENT
from rollout_common.wire.problems import ProblemError

from .http_requests import abort_abandoned
from .in_flight_requests import InFlightRequest, InFlightRequests
from .settings import ANSWER_TIMEOUT_SECONDS, COMMENT_INTERVAL_SECONDS

logger = logging.getLogger(__name__)

EVENTS_TYPE = "text/event-stream"


class TimedAnswer(StreamingResponse):
    """An answer in pieces; a client that reads it for much longer than the request's deadline is disconnected."""

    def __init__(
        self,
        content: AsyncIterable[bytes],
        deadline_seconds: float,
        headers: Mapping[str, str] | None = None,
        media_type: str = "application/json",
    ) -> None:
        super().__init__(content, headers=headers, media_type=media_type)
        self._seconds = deadline_seconds + ANSWER_TIMEOUT_SECONDS

    @override
    async def stream_response(self, send: Send) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await super().stream_response(send)
        except TimeoutError:
            logger.warning("an answer was not read to its end within %g s", self._seconds)


class _SilenceBreaker:
    """Sends the messages of an answer, and comments between them while no event comes."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._sending = False
        self._sent_at = time.monotonic()

    async def send_message(self, message: Message) -> None:
        """Send a message of the answer."""
        self._sending = True
        try:
            await self._send(message)
        finally:
            self._sending, self._sent_at = False, time.monotonic()

    async def send_comments(self) -> None:
        """Send a comment after each silence, until cancelled."""
        comment = {"type": "http.response.body", "body": STREAM_COMMENT, "more_body": True}
        with contextlib.suppress(OSError):  # the client is gone, which the answer notices itself
            while True:
                silent = time.monotonic() - self._sent_at
                if silent >= COMMENT_INTERVAL_SECONDS and not self._sending:
                    await self.send_message(comment)
                    silent = 0.0
                # A client that takes nothing for now gets no comments either.
                left = COMMENT_INTERVAL_SECONDS - silent
                await asyncio.sleep(left if left > 0 else COMMENT_INTERVAL_SECONDS)


class EventStream(TimedAnswer):
    """A response of server-sent events that flights produce; they are aborted if it ends before them.

    Nothing is sent ahead: the next event is made once the client has taken the former ones. While none comes, comments
    keep the connection open in proxies. An error in the events becomes the last one, which `report_error` writes. `waited`: the flights that produce them, with this deadline.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        report_error: Callable[[ProblemError], bytes],
        flights: InFlightRequests,
        waited: Sequence[InFlightRequest],
        deadline_seconds: float,
        headers: Mapping[str, str] | None = None,
        media_type: str = EVENTS_TYPE,
    ) -> None:
        self._events = self._report_errors(events, report_error)
        # nginx, by default, keeps an answer's pieces back until it has some kilobytes of them.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})}
        super().__init__(self._events, deadline_seconds, headers, media_type)
        self._flights, self._waited = flights, waited

    async def _report_errors(
        self, events: AsyncGenerator[bytes, None], report_error: Callable[[ProblemError], bytes]
    ) -> AsyncGenerator[bytes, None]:
        # The status line is already sent: only an event can report an error.
        async with contextlib.aclosing(events):
            try:
                async for event in events:
                    yield event
            except ProblemError as error:
                yield report_error(error)
            except Exception:
                names = [flight.request_id for flight in self._waited]
                logger.exception("a stream failed", extra={"request": ", ".join(names)})
                detail = "the stream failed; the traceback is in the worker's log"
                yield report_error(ProblemError("internal-error", detail))

    @override
    async def stream_response(self, send: Send) -> None:
        comments = None
        if self.media_type == EVENTS_TYPE:
            breaker = _SilenceBreaker(send)
            comments, send = asyncio.create_task(breaker.send_comments()), breaker.send_message
        try:
            await super().stream_response(send)
        finally:
            if comments is not None:
                comments.cancel()
            try:
                await self._events.aclose()
            finally:
                await asyncio.shield(abort_abandoned(self._flights, self._waited))
