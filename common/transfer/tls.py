"""TLS on the connections that carry weights: one end of it, and whom it trusts.

The session lives in memory and the socket stays a plain one: it blocks, is polled and interrupted as any
other, and one thread may read while another one writes, which `ssl.SSLSocket` does not allow. All
workers of a pool have one certificate, or certificates of one issuer, for the same name: they are
reached by address. Standard library only: the client uses it, too.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TLS_NAME = "rollout-worker"
"""What the certificates of all workers are for, as in `rollout_operator.api.names.CONTROL_TLS_NAME`."""
HANDSHAKE = 0x16
"""How a connection begins that speaks TLS; no frame of a sender's begins so."""
READ_BYTES = 256 << 10
"""What is taken from the socket at once."""
WRITE_BYTES = 128 << 10
"""What is encrypted at once: it stays in the processor's cache until it is sent."""
RECORD_BYTES = 16 << 10
"""The most that TLS decrypts at once."""

_NO_TLS = {
    "WRONG_VERSION_NUMBER",
    "UNEXPECTED_EOF_WHILE_READING",
    "HTTP_REQUEST",
    "UNKNOWN_PROTOCOL",
}


_SPEAKS_NONE = "it speaks no TLS on this port: is it a worker with --weights-tls required?"
_FIXES = {10: "renew it", 62: f"have it issued for the name {TLS_NAME}"}
"""By OpenSSL's number of what is wrong with a certificate: expired, for another name."""


class TlsFailed(Exception):
    """The other end speaks no TLS, or is not who it should be."""


class TlsEnded(Exception):
    """The other end has closed the connection."""


@dataclass(frozen=True, slots=True)
class Trust:
    """Whom a connection that is made trusts.

    Attributes:
        context: With the issuer's certificates.
        fix: What to do about a certificate that isn't trusted.
    """

    context: ssl.SSLContext
    fix: str = ""


Mark = tuple[int, int] | None
"""Of a file: which one it is and when it was written; None: there is none."""


def marks_of(certificate: Path) -> tuple[Mark, ...]:
    """Return what changes when a certificate or its issuer's is renewed."""
    return tuple(map(_mark, _files(certificate)))


def _files(certificate: Path) -> tuple[Path, Path]:
    return certificate, certificate.parent / "ca.crt"


def _mark(file: Path) -> Mark:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def trusting(certificate: Path) -> ssl.SSLContext:
    """Return what trusts a worker's own certificate, and who issued it: `ca.crt` beside it.

    Raises:
        OSError: A file can't be used.
    """
    context = ssl.create_default_context()
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    own, issuer = _files(certificate)
    context.load_verify_locations(own)
    if issuer.exists():
        context.load_verify_locations(issuer)
    return context


class Session:
    """TLS over a socket that somebody else owns. One thread reads; writes are the caller's to order.

    Args:
        sock: Connected; it blocks, with timeouts.
        context: Of this end.
        name: What the other end's certificate must be for; None: this end is the server.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, name: str | None) -> None:
        self._sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._in, self._out, server_side=name is None, server_hostname=name
        )
        # OpenSSL's session is no place for two threads at once; nothing waits while it is held.
        self._lock = threading.Lock()
        self._cipher = memoryview(bytearray(READ_BYTES))
        self._plain = memoryview(bytearray(RECORD_BYTES))
        self._begin = self._end = 0

    def shake_hands(self, seconds: float, fix: str = "") -> None:
        """Agree with the other end.

        Args:
            seconds: Deadline.
            fix: What to do about a certificate that isn't trusted.

        Raises:
            TlsFailed: It speaks no TLS, one of both does not trust the other, or it takes too long.
            OSError: The connection is broken; BlockingIOError: nothing came in time.
        """
        until = time.monotonic() + seconds
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    return self._flush()
                except ssl.SSLWantReadError:
                    self._flush()
                if time.monotonic() > until or not self.pull():
                    raise TlsFailed(_SPEAKS_NONE)
        except ssl.SSLError as error:
            self._flush()  # tells the other end why
            raise TlsFailed(_reason(error, fix)) from error

    def _flush(self) -> None:
        if self._out.pending:
            self._sock.sendall(self._out.read())

    def encrypted(self, *parts: bytes | memoryview) -> Iterator[bytes]:
        """Yield what is to be sent for these, in this order and before what any later call yields."""
        for part in parts:
            for begin in range(0, len(part), WRITE_BYTES):
                with memoryview(part)[begin : begin + WRITE_BYTES] as piece, self._lock:
                    done = 0
                    while done < len(piece):
                        with piece[done:] as rest:
                            done += self._tls.write(rest)
                    cipher = self._out.read()
                yield cipher

    def pull(self, flags: int = 0) -> bool:
        """Take what the socket has; False: it has ended.

        Raises:
            OSError: It is broken; BlockingIOError: there is nothing.
        """
        count = self._sock.recv_into(self._cipher, 0, flags)
        with self._cipher[:count] as taken, self._lock:
            self._in.write(taken)
        return count > 0

    def read(self, view: memoryview) -> int:
        """Return how many bytes were put there, at least one; waits for the socket.

        Raises:
            TlsEnded: There are no more.
            OSError: As `pull`.
        """
        if self._begin < self._end:
            count = min(len(view), self._end - self._begin)
            view[:count] = self._plain[self._begin : self._begin + count]
            self._begin += count
            return count
        while not (count := self._decrypted(view)):
            if not self.pull():
                raise TlsEnded
        return count

    @property
    def ready(self) -> bool:
        """Whether there is something to read without the socket.

        Raises:
            TlsEnded: There are no more bytes.
        """
        if self._begin == self._end:
            self._begin, self._end = 0, self._decrypted(self._plain)
        return self._begin < self._end

    def _decrypted(self, view: memoryview) -> int:
        with self._lock:
            try:
                count = self._tls.read(len(view), view)
            except ssl.SSLWantReadError:
                return 0
            except ssl.SSLError as error:
                raise TlsEnded(_reason(error, "")) from error
        if not count:
            raise TlsEnded
        return int(count)


def _reason(error: ssl.SSLError, fix: str) -> str:
    """Return what went wrong in words that name the fix."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why, mend = error.verify_message.rstrip("."), _FIXES.get(error.verify_code, fix)
        return f"its certificate is not trusted ({why}){': ' + mend if mend else ''}"
    reason = error.reason or "it has closed the connection"
    if reason in _NO_TLS:
        return _SPEAKS_NONE
    words = reason.replace("_", " ").lower()
    if "alert" in words and any(word in words for word in ("ca", "certificate", "unknown")):
        return f"it does not trust the certificate that it was shown ({words})"
    return f"TLS with it failed ({words})"
