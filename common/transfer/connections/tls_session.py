"""TLS on the connections that carry weights: the session of one end, and what it trusts.

The session works on memory buffers and the socket stays a plain one, so that without TLS a stream reads directly into
the place of a piece. All workers of a pool have one certificate, or certificates of one issuer, for the same name,
since callers reach them by address. Standard library only, since the client uses it, too.
"""

from __future__ import annotations

import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

TLS_NAME = "rollout-worker"
"""The name in the certificates of all workers, as in `rollout_operator.api.names.CONTROL_TLS_NAME`."""
HANDSHAKE = 0x16
"""First byte of a TLS connection; no frame of a sender begins with it."""
READ_BYTES = 256 << 10
"""How many bytes one read of the socket takes."""
WRITE_BYTES = 128 << 10
"""How many bytes are encrypted at once: they stay in the processor's cache until they are sent."""

_NO_TLS = {
    "WRONG_VERSION_NUMBER",
    "UNEXPECTED_EOF_WHILE_READING",
    "HTTP_REQUEST",
    "UNKNOWN_PROTOCOL",
}


SPEAKS_NO_TLS = "it speaks no TLS on this port: is it a worker with --weights-tls required?"
_FIXES = {10: "renew it", 62: f"have it issued for the name {TLS_NAME}"}
"""The fix by OpenSSL's error number: the certificate has expired, or is for another name."""


class TlsFailed(Exception):
    """The other end has no TLS, or its certificate is not trusted."""


class TlsEnded(Exception):
    """The other end has closed the connection."""


@dataclass(frozen=True, slots=True)
class Trust:
    """What an outgoing connection trusts.

    Attributes:
        context: Has the issuer's certificates.
        fix: What to do about a certificate that isn't trusted.
        issuers: Those certificates as PEM; empty: those of CAs that `context` has.
    """

    context: ssl.SSLContext
    fix: str = ""
    issuers: str = ""


def issuers_of(trust: Trust) -> str:
    """Return the certificates that a context trusts, as PEM, for another process that calls the same ports."""
    return trust.issuers or "".join(
        map(ssl.DER_cert_to_PEM_cert, trust.context.get_ca_certs(binary_form=True))
    )


def trust_in(issuers: str, fix: str = "") -> Trust:
    """Return the trust in these certificates; `fix`: as in `Trust`."""
    context = ssl.create_default_context(cadata=issuers)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return Trust(context, fix)


Mark = tuple[int, int] | None
"""Identity of a file: its inode and when it was written; None: the file doesn't exist."""


def _file_mark(file: Path) -> Mark:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


class CertificateTrust:
    """Trust in a worker's own certificate and its issuer's: `ca.crt` in the same folder. Safe for several threads.

    Args:
        certificate: The worker's own.
    """

    def __init__(self, certificate: Path) -> None:
        self._own, self._issuer = certificate, certificate.parent / "ca.crt"
        self._lock = threading.Lock()
        self._read: tuple[tuple[Mark, Mark], ssl.SSLContext] | None = None

    def current_context(self) -> ssl.SSLContext:
        """Return the context that trusts them: the same one until a file is renewed.

        Raises:
            OSError: A file can't be used.
        """
        with self._lock:
            marks = _file_mark(self._own), _file_mark(self._issuer)
            if self._read is None or self._read[0] != marks:
                context = ssl.create_default_context()
                context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
                context.load_verify_locations(self._own)
                if self._issuer.exists():
                    context.load_verify_locations(self._issuer)
                self._read = marks, context
            return self._read[1]


class TlsSession:
    """TLS for a connection whose socket its owner reads and writes.

    Args:
        context: This end's TLS context.
        name: The name that the other end's certificate must have; None: this end is the server.
    """

    def __init__(self, context: ssl.SSLContext, name: str | None) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._lock = threading.Lock()
        """One thread may read while another one writes, but OpenSSL's session allows one at a time."""
        self._tls = context.wrap_bio(
            self._in, self._out, server_side=name is None, server_hostname=name
        )

    def shake_hands(self, fix: str = "") -> bool:
        """Continue the handshake; return whether it is complete. The caller sends `take_pending` in any case.

        Args:
            fix: What to do about a certificate that isn't trusted.

        Raises:
            TlsFailed: The other end has no TLS, or one end does not trust the other.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise TlsFailed(_explain_tls(error, fix)) from error
        return True

    def take_pending(self) -> bytes:
        """Return the encrypted bytes that are to be sent."""
        return self._out.read()

    def encrypt(self, part: memoryview) -> bytes:
        """Return the encrypted bytes of a part; send them before those of a later call."""
        done = 0
        with self._lock:
            while done < len(part):
                with part[done:] as rest:
                    done += self._tls.write(rest)
            return self._out.read()

    def feed_cipher(self, cipher: bytes | memoryview) -> None:
        """Take encrypted bytes that came over the socket."""
        self._in.write(cipher)

    def decrypt_into(self, view: memoryview) -> int:
        """Decrypt into a buffer; return how many bytes; 0: more has to come over the socket.

        Raises:
            TlsEnded: The other end has closed the connection.
        """
        try:
            with self._lock:
                count = self._tls.read(len(view), view)
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLError as error:
            raise TlsEnded(_explain_tls(error, "")) from error
        if not count:
            raise TlsEnded
        return int(count)


def _explain_tls(error: ssl.SSLError, fix: str) -> str:
    """Return what went wrong as a text that names the fix."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why, mend = error.verify_message.rstrip("."), _FIXES.get(error.verify_code, fix)
        return f"its certificate is not trusted ({why}){': ' + mend if mend else ''}"
    reason = error.reason or "it has closed the connection"
    if reason in _NO_TLS:
        return SPEAKS_NO_TLS
    words = reason.replace("_", " ").lower()
    if "alert" in words and any(word in words for word in ("ca", "certificate", "unknown")):
        return f"it does not trust the certificate that it was shown ({words})"
    return f"TLS with it failed ({words})"
