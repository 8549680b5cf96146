"""The head's calls to one member's control port."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from rollout_common.transfer.connections.tls_session import TLS_NAME, CertificateTrust
from rollout_common.wire.gang_models import GangSlot, GangState, GangTurn, SlotRequest
from rollout_worker.settings import WorkerSettings
from rollout_worker.threads import SharedCall

from .settings import CERTIFICATE_CHECK_SECONDS, MEMBER_ANSWER_SECONDS, TOKEN_READ_SECONDS

logger = logging.getLogger(__name__)

HEAD_ENDS = "the head ends"

M = TypeVar("M", bound=BaseModel)


class MemberSilent(Exception):
    """A member did not answer, or not as a member does; the text says what happened."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        """Of the refusal, if the member refused."""


class _MemberTrust:
    """The TLS context for members: all pods of a pool present certificates of the same issuer.

    Raises:
        OSError: the pod's own certificate, or `ca.crt` next to it, can't be used.
    """

    def __init__(self, certificate: Path, name: str) -> None:
        trust = CertificateTrust(certificate)
        self._reading = SharedCall(trust.current_context, name)
        self._trouble = ""
        self.context = trust.current_context()

    async def renew_context(self) -> bool:
        """Read the files again; return whether `context` has changed. Unusable files change nothing."""
        try:
            found = await self._reading.get_result(CERTIFICATE_CHECK_SECONDS)
        except OSError as error:  # includes TimeoutError and the errors of ssl
            if str(error) != self._trouble:
                logger.warning("the head keeps the certificates that it had: %s", error)
            self._trouble = str(error)
            return False
        self._trouble = ""
        former, self.context = self.context, found
        return found is not former


class MemberClient:
    """Calls one member; every call raises `MemberSilent` if it fails.

    Args:
        rank: Of the member.
        address: HOST:PORT of its control port.
        leader: Boot id of this head.
        settings: The head's.
    """

    def __init__(self, rank: int, address: str, leader: str, settings: WorkerSettings) -> None:
        self.rank = rank
        self.name = f"rank {rank} at {address}"
        self._leader = leader
        file = {"token": settings.auth_token_file, "kubernetes": settings.gang_token_file}
        found = file.get(settings.auth)
        self._token = None if found is None else SharedCall(found.read_text, f"gang-{rank}")
        secure = settings.control_tls_cert_file
        self._extensions = {} if secure is None else {"sni_hostname": TLS_NAME}
        self._url = f"http{'s' if secure else ''}://{address}/v1/gang/"
        self._trust = None if secure is None else _MemberTrust(secure, f"trust-{rank}")
        self._http = self._make_client()
        self._former: httpx.AsyncClient | None = None
        self._calls: set[asyncio.Task[httpx.Response]] = set()

    def _make_client(self) -> httpx.AsyncClient:
        # Over plain HTTP no certificate is checked, so none is trusted: to read the system's takes time.
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return httpx.AsyncClient(
            base_url=self._url,
            verify=plain if self._trust is None else self._trust.context,
            timeout=MEMBER_ANSWER_SECONDS,
            trust_env=False,  # a proxy is not meant for the gang's own network
        )

    async def _renew_certificates(self) -> None:
        if self._trust is None or not await self._trust.renew_context() or self._http.is_closed:
            return
        outdated, self._former = self._former, self._http  # its calls may still be under way
        self._http = self._make_client()
        if outdated is not None:
            await outdated.aclose()

    async def get_state(self, *, started: bool) -> GangState:
        """Get the member's state, and say whether the head's engine runs."""
        return await self._call_member(GangState, "GET", "state", started=str(started).lower())

    async def open_slot(self, slot: str, request: SlotRequest) -> GangSlot:
        """Make the member fill a slot."""
        return await self._call_member(GangSlot, "PUT", f"slots/{slot}", body=request)

    async def get_slot(self, slot: str) -> GangSlot:
        """Get the progress of a slot."""
        return await self._call_member(GangSlot, "GET", f"slots/{slot}")

    async def close_slot(self, slot: str) -> None:
        """Make the member give a slot back, if it has it."""
        await self._call_member(GangState, "DELETE", f"slots/{slot}")

    async def take_turn(self, attempt: int) -> GangTurn:
        """Make the member take its turn; it answers once it holds it, or how far it is after a moment."""
        return await self._call_member(GangTurn, "PUT", f"turn/{attempt}")

    async def use_turn(self, attempt: int) -> GangTurn:
        """Make the member keep a turn that it holds, even if this head falls silent, and load its ranks."""
        return await self._call_member(GangTurn, "POST", f"turn/{attempt}/use")

    async def give_turn(self, attempt: int, *, started: bool) -> GangTurn:
        """Make the member give its turn back, and refuse this attempt from now on."""
        return await self._call_member(
            GangTurn, "DELETE", f"turn/{attempt}", started=str(started).lower()
        )

    async def close(self) -> None:
        """Close the connections; calls under way fail."""
        # First: httpx overlooks a connection that is still being made, and nobody would close it.
        for call in self._calls:
            call.cancel()
        await self._http.aclose()
        if self._former is not None:
            await self._former.aclose()

    async def _call_member(
        self, kind: type[M], method: str, path: str, body: BaseModel | None = None, **query: str
    ) -> M:
        await self._renew_certificates()
        try:
            answer = await self._send_request(
                method,
                path,
                params={"leader": self._leader, **query},
                json=None if body is None else body.model_dump(mode="json"),
                headers=await self._auth_headers(),
                extensions=self._extensions,
            )
        except (httpx.HTTPError, OSError) as error:
            raise MemberSilent(f"{type(error).__name__}: {error}") from error
        if not answer.is_success:
            status = answer.status_code
            raise MemberSilent(f"it answered {status}: {_error_detail(answer)}", status)
        try:
            return kind.model_validate_json(answer.content)
        except ValidationError as error:
            raise MemberSilent(
                f"it answered what no member does: {error.errors()[0]['msg']}"
            ) from error

    async def _send_request(self, method: str, path: str, **fields: Any) -> httpx.Response:
        if self._http.is_closed:
            raise MemberSilent(HEAD_ENDS)
        call = asyncio.create_task(self._http.request(method, path, **fields))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return await call
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and not caller.cancelling():
                raise MemberSilent(HEAD_ENDS) from None  # `close` cancelled it
            raise

    async def _auth_headers(self) -> dict[str, str]:
        if self._token is None:
            return {}
        token = (await self._token.get_result(TOKEN_READ_SECONDS)).strip()
        return {"Authorization": f"Bearer {token}"}


def _error_detail(answer: httpx.Response) -> str:
    try:
        found: Any = answer.json()
        return str(found["detail"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
