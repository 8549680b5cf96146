"""How this worker reaches other workers that hold weights: by TLS or plain TCP, and how fast it sends."""

from __future__ import annotations

from pathlib import Path

from rollout_common.transfer.connections.dialing import dial_stream
from rollout_common.transfer.connections.frame_stream import FrameStream
from rollout_common.transfer.connections.frames import Untrusted
from rollout_common.transfer.connections.rate_limit import RateLimit
from rollout_common.transfer.connections.tls_session import CertificateTrust, Trust
from rollout_common.transfer.settings import HOP_SECONDS
from rollout_worker.settings import WorkerSettings

_FIX = "all workers of a pool need one issuer: its ca.crt lies next to --control-tls-cert-file"


class PeerRoute:
    """Connects to other workers, with one trust and one rate limit for all connections.

    Args:
        certificate: This worker's certificate, which others are checked against; None: connections use plain TCP.
        rate: Most bytes a second that all connections together send; None: no limit.
    """

    def __init__(self, certificate: Path | None = None, rate: int | None = None) -> None:
        self._certificate = certificate
        self._trust = None if certificate is None else CertificateTrust(certificate)
        self.pace = None if rate is None else RateLimit(rate)
        """The rate limit of all connections together; None: no limit."""

    @classmethod
    def of(cls, settings: WorkerSettings) -> PeerRoute:
        """Return what the settings of a worker configure."""
        certificate = settings.control_tls_cert_file if settings.weights_tls == "required" else None
        return cls(certificate, settings.weights_egress)

    async def dial_worker(self, host: str, port: int) -> FrameStream:
        """Connect to another worker, which counts as dead after `HOP_SECONDS` of silence.

        Raises:
            TransferError: It can't be reached, or is not trusted.
        """
        trust = None
        if self._trust is not None:
            try:
                trust = Trust(self._trust.current_context(), _FIX)
            except OSError as error:
                raise Untrusted(
                    f"--control-tls-cert-file {str(self._certificate)!r} can't be used: {error}"
                ) from error
        return await dial_stream(host, port, HOP_SECONDS, silence=HOP_SECONDS, trust=trust)
