"""How this worker reaches others with weights, hops and peers alike: over TLS or not, and how fast."""

from __future__ import annotations

import ssl
import threading
from pathlib import Path

from rollout_common.transfer.connection import Connection
from rollout_common.transfer.dialing import dial
from rollout_common.transfer.frames import HOP_SECONDS, Untrusted
from rollout_common.transfer.pace import Pace
from rollout_common.transfer.tls import Trust, marks_of, trusting
from rollout_worker.settings import WorkerSettings

_FIX = "all workers of a pool need one issuer: its ca.crt lies beside --control-tls-cert-file"


class Outward:
    """See the module.

    Args:
        certificate: This worker's own, if others are reached over TLS alone; says who is trusted.
        rate: Bytes a second that all connections together send; None: as many as go.
    """

    def __init__(self, certificate: Path | None = None, rate: int | None = None) -> None:
        self._certificate = certificate
        self._pace = None if rate is None else Pace(rate)
        self._lock = threading.Lock()
        self._read: tuple[object, ssl.SSLContext] | None = None

    @classmethod
    def of(cls, settings: WorkerSettings) -> Outward:
        """Return what the settings of a worker say."""
        certificate = settings.control_tls_cert_file if settings.weights_tls == "required" else None
        return cls(certificate, settings.weights_egress)

    def dial(self, host: str, port: int) -> Connection:
        """Connect to another worker, which is dead if it is silent for `HOP_SECONDS`.

        Raises:
            TransferError: It can't be reached, or not be trusted.
        """
        trust = None if self._certificate is None else Trust(self._trusting(), _FIX)
        return dial(host, port, HOP_SECONDS, silence=HOP_SECONDS, trust=trust)

    def _trusting(self) -> ssl.SSLContext:
        assert self._certificate is not None
        with self._lock:
            try:
                marks = marks_of(self._certificate)
                if self._read is None or self._read[0] != marks:
                    self._read = (marks, trusting(self._certificate))
            except OSError as error:
                raise Untrusted(
                    f"--control-tls-cert-file {str(self._certificate)!r} can't be used: {error}"
                ) from error
            return self._read[1]

    def wait_for(self, connection: Connection, nbytes: int) -> None:
        """Return when so many bytes may be sent there, or once it is closed."""
        connection.wait_for(self._pace, nbytes)
