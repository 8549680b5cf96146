"""The control port's certificate: read from files, and again when it is renewed."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from rollout_worker.settings import InvalidSettings, WorkerSettings
from rollout_worker.threads import SharedCall

from .settings import CERTIFICATE_FILE_SECONDS, CERTIFICATE_RELOAD_SECONDS

logger = logging.getLogger(__name__)


class ServingCertificate:
    """The TLS context of new connections."""

    def __init__(
        self, cert: Path, key: Path, every_seconds: float = CERTIFICATE_RELOAD_SECONDS
    ) -> None:
        """Read the files.

        Raises:
            InvalidSettings: They can't be used.
        """
        self._cert, self._key = cert, key
        self._every = every_seconds
        self._reading = SharedCall(self._load_context, "certificate")
        try:
            self.context = self._load_context()
        except OSError as error:
            raise InvalidSettings(
                f"--control-tls-cert-file {str(cert)!r} and --control-tls-key-file {str(key)!r}"
                f" can't be used: {error}"
            ) from error

    def _load_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._cert, self._key)
        return context

    async def keep_reloading(self) -> None:
        """Until cancelled, read the files again and again; unusable files change nothing."""
        while True:
            await asyncio.sleep(self._every)
            try:
                self.context = await self._reading.get_result(CERTIFICATE_FILE_SECONDS)
            except OSError as error:  # a TimeoutError is one, and ssl's errors are
                logger.warning("the control port keeps its old certificate: %s", error)


def serving_certificate(settings: WorkerSettings) -> ServingCertificate | None:
    """The control port's certificate, if the settings name one."""
    cert, key = settings.control_tls_cert_file, settings.control_tls_key_file
    return None if cert is None or key is None else ServingCertificate(cert, key)
