"""Members from DNS: every address behind a name, such as a headless Service's.

DNS knows neither readiness nor ranks, so each address must answer `GET /ready` before it gets
requests. Pods without a data port never do, and cost a probe every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from .pool_members import CONTROL_PORT, DATA_PORT, Member, Publish
from .settings import RESOLVE_INTERVAL_SECONDS, RESOLVE_TIMEOUT_SECONDS

logger = logging.getLogger(__name__)


class DnsDiscovery:
    """Resolves a name, such as `math-heads.train.svc`, every `ttl_seconds`, and publishes addresses that have changed."""

    refused = False

    def __init__(
        self, host: str, port: int = DATA_PORT, ttl_seconds: float = RESOLVE_INTERVAL_SECONDS
    ) -> None:
        self.trouble = ""
        """Why it learns nothing new at the moment; empty: all is well."""
        self._host = host
        self._port = port
        self._ttl = ttl_seconds

    async def run_discovery(self, publish: Publish) -> None:
        """Publish each new set until cancelled."""
        last: tuple[Member, ...] | None = None
        while True:
            found = await self._resolve_members()
            if found is not None and found != last:
                last = found
                publish(found)
            await asyncio.sleep(self._ttl)

    async def _resolve_members(self) -> tuple[Member, ...] | None:
        """Return the members now; None: nothing answered, so the last set stays."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_SECONDS):
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError, UnicodeError) as error:
            self._report_trouble(f"{self._host} can't be resolved: {error or type(error).__name__}")
            # DNS has no such name while a headless Service has no pods: then the pool is empty.
            gone = isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME
            return () if gone else None
        self._report_trouble("")
        hosts = sorted({str(address[0]) for _, _, _, _, address in found})
        return tuple(self._make_member(f"[{h}]" if ":" in h else h) for h in hosts)

    def _make_member(self, host: str) -> Member:
        return Member(
            url=f"http://{host}:{self._port}",
            name=f"{host}:{self._port}",
            control_url=f"http://{host}:{CONTROL_PORT}",
            proven=False,
        )

    def _report_trouble(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            logger.warning("%s", trouble)
        self.trouble = trouble
