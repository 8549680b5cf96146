"""TLS to an API server, as kubectl does it."""

from __future__ import annotations

import ssl
import tempfile

from typing_extensions import override


class ServerTls(ssl.SSLContext):
    """The client's side of TLS: it may want another name than the URL's host in the server's certificate.

    Made from scratch: `ssl.create_default_context` of Python 3.13 refuses authorities that many clusters
    have (`VERIFY_X509_STRICT`). Any certificate of the CA file is trusted, be it an intermediate authority's.
    """

    server_name: str | None = None

    @override
    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        # asyncio, and so each HTTP library over it, makes its connections here.
        name = self.server_name or server_hostname
        return super().wrap_bio(incoming, outgoing, server_side, name, session)


def make_tls(
    authority: bytes | None, *, server_name: str | None = None, insecure: bool = False
) -> ServerTls:
    """Return the context for a server.

    Args:
        authority: Certificates that are trusted, as PEM; None: those of the system.
        server_name: Must be in the server's certificate; None: the URL's host.
        insecure: Trust every server.

    Raises:
        ssl.SSLError, ValueError: It has no certificate.
    """
    tls = ServerTls(ssl.PROTOCOL_TLS_CLIENT)
    tls.server_name = server_name
    tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if insecure:
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    elif authority is not None:
        # Files of authorities have comments in any encoding; the ssl module takes ASCII.
        tls.load_verify_locations(cadata=authority.decode("ascii", "ignore"))
    else:
        tls.load_default_certs()
    return tls


def load_certificate(tls: ssl.SSLContext, pem: bytes) -> None:
    """Use a client's certificate and its key; the ssl module takes only files.

    Raises:
        ssl.SSLError: It is not a certificate with its key.
    """
    with tempfile.NamedTemporaryFile() as file:  # private, and deleted at once
        file.write(pem + b"\n")
        file.flush()
        tls.load_cert_chain(file.name)
