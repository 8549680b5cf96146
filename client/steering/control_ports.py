"""The control ports of all members of a pool, asked at the same time, and the options of their orders."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx

from rollout_client.discovery.pool_members import Member
from rollout_client.errors import SteeringFailed
from rollout_client.http_clients import (
    FILES_EACH,
    HttpClients,
    lacks_files,
    origin_of,
    trusted_authorities,
)
from rollout_client.worker_control import (
    ControlError,
    ControlUnreachable,
    WorkerControl,
    send_over_httpx,
)
from rollout_common.transfer.connections.tls_session import Trust
from rollout_common.wire import (
    CommitRequest,
    InFlightPolicy,
    OnDeadline,
    SleepRequest,
    WeightsDtypes,
    WeightsId,
    WorkerState,
)

from .settings import ASK_AGAIN_SECONDS, BUSY_RETRY_SECONDS

T = TypeVar("T")
Token = str | Callable[[], str | None] | None

MOUNTED_TOKEN = Path("/var/run/secrets/rollout.dev/token")
"""Where a trainer's pod has its token for control ports by default."""


@dataclass(frozen=True, slots=True)
class DirectOptions:
    """How to steer a pool without an operator.

    Attributes:
        token: Bearer token of the control ports, or a function that returns it.
        control_ca: File with the authorities that certificates of the control ports are checked against,
            if their URLs are https; default: the public ones.
        in_flight: What a commit does to running requests.
        drain_seconds: How long running requests may continue before a commit, a sleep or a pause.
        on_deadline: What happens to requests that still run then.
        sleep_level: 1 keeps a copy of the weights, 2 drops them.
    """

    token: Token = None
    control_ca: str | Path | None = None
    in_flight: InFlightPolicy = "Drain"
    drain_seconds: float = 30.0
    on_deadline: OnDeadline = "Abort"
    sleep_level: int = 1

    def __post_init__(self) -> None:
        # Validate now: once weights are staged it is too late to learn that no worker accepts these.
        self.commit_request(WeightsId(epoch=0, version=0))
        self.sleep_request()

    def commit_request(
        self, identity: WeightsId, seconds: float | None = None, root_hash: str | None = None
    ) -> CommitRequest:
        """Return the order to flip to staged weights of this content after a drain of at most `seconds`."""
        drain = self.drain_seconds if seconds is None else min(self.drain_seconds, seconds)
        return CommitRequest(
            epoch=identity.epoch,
            version=identity.version,
            root_hash=root_hash,
            in_flight=self.in_flight,
            deadline_seconds=drain,
            on_deadline=self.on_deadline,
        )

    def sleep_request(self) -> SleepRequest:
        """Return the order to fall asleep."""
        return SleepRequest.model_validate(
            {"level": self.sleep_level, "deadline_seconds": self.drain_seconds}
        )


def read_mounted_token(audience: str, path: Path = MOUNTED_TOKEN) -> Callable[[], str]:
    """Return a function that reads the mounted token, which the kubelet renews; `audience` is for its error."""

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
        members: Returns the members of this moment.
        token: Bearer token, or a function that returns it.
        ca: File with the authorities that certificates of https ports are checked against.
        tls_name: The name that certificates must have; None: the host of each URL.
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
        issuers = "" if ca is None else _certificates_in(Path(ca).read_text(errors="replace"))
        self.trust = Trust(context, "give the file with its CA as control_ca", issuers)
        """What the ports for weights are checked against; always for the name of all workers."""
        self._clients = HttpClients(lambda _: httpx.AsyncClient(verify=context, trust_env=False))
        self._send = send_over_httpx(self._clients.client_for, tls_name)

    @property
    def is_closed(self) -> bool:
        """Whether it is too late to ask anything."""
        return self._clients.is_closed

    async def close(self) -> None:
        """Close all connections."""
        await self._clients.close()

    def member_hosts(self) -> dict[str, str]:
        """Return the address of each member, where all its ports are, by name."""
        found = {each.name: urlsplit(each.control_url or "").hostname for each in self._members()}
        return {name: host for name, host in found.items() if host is not None}

    async def get_states(self, patience: float = 0.0) -> dict[str, WorkerState]:
        """Return the states of the members that answer, by name.

        Args:
            patience: For this many seconds, members that accept calls but answer too late are asked again.

        Raises:
            SteeringFailed: No member answers, or one refuses.
        """
        until = time.monotonic() + patience
        answers = await self.ask_members(lambda control: control.state())
        while time.monotonic() < until:
            slow = [n for n, a in answers.items() if isinstance(a, ControlUnreachable) and a.slow]
            if not slow:
                break
            await asyncio.sleep(ASK_AGAIN_SECONDS)
            answers |= await self.ask_members(lambda control: control.state(), slow)
        for name, answer in answers.items():
            if isinstance(answer, ControlError):
                raise SteeringFailed(answer.detail, replica=name) from answer
        found = {n: a for n, a in answers.items() if isinstance(a, WorkerState)}
        if not found:
            said = "; ".join(dict.fromkeys(map(str, answers.values())))  # often one cause for all
            raise SteeringFailed(f"no worker answers ({said or 'the pool has no members'})")
        return found

    async def describe_checkpoint(self) -> WeightsDtypes:
        """Return the dtypes and the root hash of the model's checkpoint from the first member that reports them.

        Raises:
            SteeringFailed: No member does.
        """
        answers = await self.ask_members(lambda control: control.dtypes())
        for answer in answers.values():
            if isinstance(answer, WeightsDtypes):
                return answer
        said = (f"{name}: {answer}" for name, answer in answers.items())
        why = "; ".join(said) or "the pool has no members"
        raise SteeringFailed(f"no worker describes the checkpoint of its model ({why})")

    async def ask_members(
        self,
        question: Callable[[WorkerControl], Awaitable[T]],
        names: Iterable[str] | None = None,
    ) -> dict[str, T | ControlError | ControlUnreachable]:
        """Ask these members, by default all, at the same time; refusals and silence are answers, too.

        A member that was too busy to look at the question is asked again, for `BUSY_RETRY_SECONDS`.

        Raises:
            SteeringFailed: The URL of a member's control port is not known, or this process may not open as many
                connections.
        """
        controls = self._member_controls()
        asked = list(controls if names is None else names)

        async def one(name: str) -> T | ControlError | ControlUnreachable:
            if name not in controls:
                return ControlUnreachable(f"{name} is not a member any more")
            until = time.monotonic() + BUSY_RETRY_SECONDS
            while True:
                try:
                    return await question(controls[name])
                except ControlUnreachable as error:
                    if lacks_files(error):
                        raise _files_error(len(controls), error) from error
                    return error
                except ControlError as error:
                    if not _is_busy(error) or time.monotonic() > until:
                        return error
                await asyncio.sleep(ASK_AGAIN_SECONDS)

        return dict(zip(asked, await asyncio.gather(*map(one, asked)), strict=True))

    def _member_controls(self) -> dict[str, WorkerControl]:
        found, origins = {}, set()
        for member in self._members():
            if member.control_url is None:
                why = "its control port is not known: give control_urls to from_urls"
                raise SteeringFailed(why, replica=member.name)
            found[member.name] = WorkerControl(member.control_url, self._read_token, self._send)
            origins.add(origin_of(member.control_url))
        self._clients.keep_origins(origins)
        return found

    async def _read_token(self) -> str | None:
        try:
            return self._bearer() if callable(self._bearer) else self._bearer
        except (OSError, ValueError) as error:
            # The kubelet may be replacing the file at this moment: transient, like a silent worker.
            why = f"the token of the control ports can't be read: {error}"
            raise ControlUnreachable(why) from error


def _files_error(members: int, error: ControlUnreachable) -> SteeringFailed:
    # As unreachable, most members of a large pool would be left out, and nobody would notice.
    return SteeringFailed(
        f"this process may not open enough files for {members} members of the pool ({error}): raise its limit of open"
        f" files (ulimit -n), by {FILES_EACH} for each member"
    )


def _is_busy(error: ControlError) -> bool:
    # Too many calls, or a gateway that answered for a worker that never saw the question.
    if error.status == 429 or error.slug == "auth-unavailable":
        return True
    return error.slug == "" and error.status in (502, 503, 504)


def _certificates_in(text: str) -> str:
    """Return the certificates of a PEM file alone: it may have a key, too."""
    found = re.findall("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", text, re.DOTALL)
    return "\n".join([*found, ""]) if found else ""


def _tls_context(ca: str | Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        raise ValueError(f"control_ca {str(ca)!r} can't be used: {error}") from error
