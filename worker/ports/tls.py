"""The control port's certificate: read from files, and read again when it is renewed."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from rollout_worker.settings import BadSettings, Settings
from rollout_worker.threads import Shared

logger = logging.getLogger(__name__)

RELOAD_SECONDS = 60.0
FILE_SECONDS = 10.0
"""What the files may take to be read."""


class Certificate:
    """What new connections are met with."""

    def __init__(self, cert: Path, key: Path, every_seconds: float = RELOAD_SECONDS) -> None:
        """Read the files.

        Raises:
            BadSettings: they can't be used.
        """
        self._cert, self._key = cert, key
        self._every = every_seconds
        self._reading = Shared(self._read, "certificate")
        try:
            self.context = self._read()
        except OSError as error:
            raise BadSettings(
                f"--control-tls-cert-file {str(cert)!r} and --control-tls-key-file {str(key)!r}"
                f" can't be used: {error}"
            ) from error

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._cert, self._key)
        return context

    async def keep(self) -> None:
        """Read the files again and again, until cancelled; what can't be used changes nothing."""
        while True:
            await asyncio.sleep(self._every)
            try:
                self.context = await self._reading.get(FILE_SECONDS)
            except OSError as error:  # a TimeoutError is one, and ssl's errors are
                logger.warning("the control port keeps its old certificate: %s", error)


def certificate(settings: Settings) -> Certificate | None:
    """The control port's certificate, if it has one.

    Raises:
        BadSettings: its files can't be used.
    """
    cert, key = settings.control_tls_cert_file, settings.control_tls_key_file
    return None if cert is None or key is None else Certificate(cert, key)
