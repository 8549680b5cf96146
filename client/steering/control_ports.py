"""The control ports of all members of a pool, asked at the same time."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx

from rollout_client.discovery.pool_members import Member
from rollout_client.errors import SteeringFailed
from rollout_client.routing.member_clients import trusted_authorities
from rollout_client.worker_control import (
    ControlError,
    ControlUnreachable,
    WorkerControl,
    send_over_httpx,
)
from rollout_common.transfer.tls import Trust
from rollout_common.wire import WeightsDtypes, WorkerState

from .settings import ASK_AGAIN_SECONDS, BUSY_RETRY_SECONDS

T = TypeVar("T")
Token = str | Callable[[], str | None] | None


MOUNTED_TOKEN = Path("/var/run/secrets/rollout.dev/token")
"""Where a trainer's pod has its token for control ports, unless it says otherwise."""


def read_mounted_token(audience: str, path: Path = MOUNTED_TOKEN) -> Callable[[], str]:
    """Return what reads the token that the kubelet renews; it is for this audience."""

    def read() -> str:
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            raise ValueError(
                f"there is none at {path}: mount a service account token (projected volume) for the "
                f"audience {audience} there, or give control_token to from_cluster"
            ) from None

    return read


class ControlPorts:
    """Asks the control ports of all members.

    Args:
        members: Returns who is there now.
        token: Bearer token, or a function that returns it.
        ca: File with the certificates that those of https ports are checked against.
        tls_name: What they must be for; None: the host of each URL.
    """

    def __init__(
        self,
        members: Callable[[], Sequence[Member]],
        token: Token,
        ca: str | Path | None = None,
        tls_name: str | None = None,
    ) -> None:
        self._members = members
        self._bearer = token
        context = trusted_authorities(environment=False) if ca is None else _tls_context(ca)
        self.trust = Trust(context, "give the file with its CA as control_ca")
        """Whom the ports for weights are checked against; always for the name of all workers."""
        self._http = httpx.AsyncClient(
            verify=context,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self._send = send_over_httpx(self._http, tls_name)

    @property
    def is_closed(self) -> bool:
        """Whether it is too late to ask anything."""
        return self._http.is_closed

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    def member_names(self) -> list[str]:
        """Return the names of the members that are there now.

        Raises:
            SteeringFailed: It is not known where a member's control port is.
        """
        return list(self._member_controls())

    def host_of(self, name: str) -> str | None:
        """Return the address of a member: its ports are all there. None: it is gone."""
        urls = {member.name: member.control_url for member in self._members()}
        return urlsplit(urls.get(name) or "").hostname

    async def get_states(self, patience: float = 0.0) -> dict[str, WorkerState]:
        """Return the states of the members that answer, by name.

        Args:
            patience: Seconds for which those are asked again that are there, it seems, but too slow.

        Raises:
            SteeringFailed: None answers, or one refuses to.
        """
        until = time.monotonic() + patience
        answers = await self.ask_members(self.member_names(), lambda control: control.state())
        while (slow := _slow_members(answers)) and time.monotonic() < until:
            await asyncio.sleep(ASK_AGAIN_SECONDS)
            answers |= await self.ask_members(slow, lambda control: control.state())
        for name, answer in answers.items():
            if isinstance(answer, ControlError):
                raise SteeringFailed(answer.detail, replica=name) from answer
        found = {n: a for n, a in answers.items() if isinstance(a, WorkerState)}
        if not found:
            said = "; ".join(str(answer) for answer in answers.values())
            raise SteeringFailed(f"no worker answers ({said or 'the pool has no members'})")
        return found

    async def get_dtypes(self) -> Mapping[str, str]:
        """Return the dtypes of the model's checkpoint, as a member tells them.

        Raises:
            SteeringFailed: None does.
        """
        answers = await self.ask_members(self.member_names(), lambda control: control.dtypes())
        for answer in answers.values():
            if isinstance(answer, WeightsDtypes):
                return answer.dtypes
        said = (f"{name}: {answer}" for name, answer in answers.items())
        why = "; ".join(said) or "the pool has no members"
        raise SteeringFailed(f"cast: no worker tells the dtypes of its model ({why})")

    async def ask_members(
        self, names: Sequence[str], question: Callable[[WorkerControl], Awaitable[T]]
    ) -> dict[str, T | ControlError | ControlUnreachable]:
        """Ask all of these at the same time; refusals and silence are answers, too.

        Who was too busy to look at the question is asked again, for `BUSY_RETRY_SECONDS`.
        """
        controls = self._member_controls()

        async def one(name: str) -> T | ControlError | ControlUnreachable:
            if name not in controls:
                return ControlUnreachable(f"{name} is not a member any more")
            until = time.monotonic() + BUSY_RETRY_SECONDS
            while True:
                try:
                    return await question(controls[name])
                except ControlUnreachable as error:
                    return error
                except ControlError as error:
                    if not _is_busy(error) or time.monotonic() > until:
                        return error
                await asyncio.sleep(ASK_AGAIN_SECONDS)

        return dict(zip(names, await asyncio.gather(*map(one, names)), strict=True))

    def _member_controls(self) -> dict[str, WorkerControl]:
        found = {}
        for member in self._members():
            if member.control_url is None:
                why = "its control port is not known: give control_urls to from_urls"
                raise SteeringFailed(why, replica=member.name)
            found[member.name] = WorkerControl(member.control_url, self._read_token, self._send)
        return found

    async def _read_token(self) -> str | None:
        try:
            return self._bearer() if callable(self._bearer) else self._bearer
        except (OSError, ValueError) as error:
            # A file that is renewed this moment: in passing, like a worker that does not answer.
            why = f"the token of the control ports can't be read: {error}"
            raise ControlUnreachable(why) from error


def _slow_members(answers: Mapping[str, object]) -> list[str]:
    """Return who has not answered in time, and may be merely busy."""
    return [n for n, a in answers.items() if isinstance(a, ControlUnreachable) and a.slow]


def _is_busy(error: ControlError) -> bool:
    """Whether nobody has looked at the question: too many calls, or the gateway's own answer."""
    if error.status == 429 or error.slug == "auth-unavailable":
        return True
    return error.slug == "" and error.status in (502, 503, 504)


def _tls_context(ca: str | Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        raise ValueError(f"control_ca {str(ca)!r} can't be used: {error}") from error
