"""A connection to a control port, and one exchange at a time over it.

The client of aiohttp keeps 13 KiB for each connection that waits for its next use; this one keeps what asyncio needs for
a socket. Answers are read by aiohttp's parser, up to a bound, and never unpacked.
"""

from __future__ import annotations

import asyncio
import ssl

from aiohttp.http import HttpResponseParser
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader
from typing_extensions import override

MAX_ANSWER_BYTES = 4 << 20
"""A state has some kilobytes."""


class WorkerConnection(asyncio.Protocol):
    """An open connection, which is kept between two exchanges; see the module."""

    __slots__ = ("_exchange", "_transport", "used_at")

    def __init__(self) -> None:
        self.used_at = 0.0
        """When its last exchange ended, by the loop's clock."""
        self._transport: asyncio.Transport | None = None
        self._exchange: _Exchange | None = None

    @property
    def is_open(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def start_tls(self, context: ssl.SSLContext, name: str) -> None:
        """Go on over TLS; the other end's certificate must have this name.

        Raises:
            OSError: there is no TLS with it; the connection is closed.
        """
        secured = None
        if (plain := self._transport) is not None:
            loop = asyncio.get_running_loop()
            secured = await loop.start_tls(plain, self, context, server_hostname=name)
        if secured is None:
            raise ConnectionResetError("the worker has closed the connection")
        self._transport = secured

    async def send_request(self, request: bytes) -> tuple[int, bytes]:
        """Send a request and return status and body of its answer.

        Raises:
            OSError: no whole answer came, or something else; the connection is closed.
        """
        if self._transport is None:
            raise ConnectionResetError("the worker has closed the connection")
        self._exchange = exchange = _Exchange()
        self._transport.write(request)
        try:
            found = await exchange.answer
        except BaseException:
            self.close()
            raise
        finally:
            self._exchange = None
        if exchange.is_last:
            self.close()
        return found

    def close(self) -> None:
        """Close it at once; nobody waits for what it may have left to say."""
        if self._transport is not None:
            self._transport.abort()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    @override
    def data_received(self, data: bytes) -> None:
        if self._exchange is None:
            self.close()  # nobody asked
        else:
            self._exchange.take_bytes(data)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._exchange is not None:
            self._exchange.end_bytes(exc)


class _Exchange:
    """The answer to one request, as it comes."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        self.is_last = False
        """No other request may follow on this connection."""
        self._parser = HttpResponseParser(
            self,  # type: ignore[arg-type] # of a protocol its streams use but the last two methods
            loop,
            MAX_ANSWER_BYTES,
            read_until_eof=True,
            auto_decompress=False,
        )
        self._code = 0
        self._body: StreamReader | None = None

    def take_bytes(self, data: bytes) -> None:
        """Take what has arrived."""
        if self.answer.done():
            self.is_last = True  # more than was asked for
            return
        try:
            messages, _, _ = self._parser.feed_data(data)
        except HttpProcessingError as error:
            why = error.message.partition("\n")[0].rstrip(":")
            self._fail(ConnectionError(f"the answer is not HTTP: {why}"))
            return
        for message, body in messages:
            self.is_last = self.is_last or message.should_close or self._body is not None
            self._code, self._body = message.code, body
        self._end_if_complete()

    def end_bytes(self, error: Exception | None) -> None:
        """Take the end of the connection, which may be that of an answer without a length."""
        if self.answer.done():
            return
        try:
            self._parser.feed_eof()
        except HttpProcessingError:
            self._fail(ConnectionResetError("the answer ends in the middle"))
        self._end_if_complete()
        self._fail(error or ConnectionResetError("the worker has closed the connection"))

    def _end_if_complete(self) -> None:
        body = self._body
        if body is None or self.answer.done():
            return
        if (error := body.exception()) is not None:
            self._fail(ConnectionError(str(error)))
        elif body.total_bytes > MAX_ANSWER_BYTES:
            self._fail(ConnectionError(f"the answer has more than {MAX_ANSWER_BYTES >> 20} MiB"))
        elif body.is_eof():
            self.answer.set_result((self._code, body.read_nowait()))

    def _fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def pause_reading(self) -> None:
        """Read on: an answer has a bound, and no reader to wait for."""

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Read on."""
