"""Keeps the replicas of a pool without an operator at the pool's weights and state.

A replica that was restarted, or was away during a publish, comes back without the weights. The keeper
looks at all replicas every second and gives each what it lacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator

from rollout_client.worker_control import ControlError, WorkerControl
from rollout_common.wire import (
    OfferRequest,
    OfferResponse,
    PauseRequest,
    Peer,
    PushedBytes,
    RequireRequest,
    StageRequest,
    StageSource,
    WakeRequest,
    WeightsId,
    WorkerState,
)

from .control_ports import ControlPorts, DirectOptions
from .settings import (
    KEEP_INTERVAL_SECONDS,
    MAX_LOOKS_PER_SECOND,
    POLL_SECONDS,
    SEED_TIMEOUT_SECONDS,
)
from .staging_barrier import Lost, Staged, Unusable, Version, progress_of
from .steering_protocol import PoolState

logger = logging.getLogger(__name__)

MAX_PEERS = 3
"""How many members a replica fetches pushed weights from: more only wait for its link."""


class PoolKeeper:
    """Gives each replica what it lacks, from `start` to `stop`; tells `on_weights` which members serve a version now."""

    def __init__(
        self,
        ports: ControlPorts,
        options: DirectOptions,
        on_weights: Callable[[Iterable[str], Version], None],
    ) -> None:
        self.target: Version | None = None
        """What every replica must serve in the end."""
        self.state: PoolState | None = None
        """The state that every replica must reach; None: nobody asked for one."""
        self.lock = asyncio.Lock()
        """Held during a publish and while the keeper gives weights, so that they exclude each other."""
        self._orders, self._ordering = 0, 0
        """How often the pool itself has ordered a state, and how many of these orders are under way."""
        self._ports = ports
        self._options = options
        self._on_weights = on_weights
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the loop, if there is anything to give to the replicas."""
        needed = self.target is not None or self.state is not None
        if self._task is None and needed and not self._ports.is_closed:
            self._task = asyncio.create_task(self._run_loop(), name="keeper of the pool")

    async def stop(self) -> None:
        """Stop the loop and wait for its end."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run_loop(self) -> None:
        while True:
            pace = len(self._ports.member_hosts()) / MAX_LOOKS_PER_SECOND
            await asyncio.sleep(max(KEEP_INTERVAL_SECONDS, pace))
            try:
                await self._check_replicas()
            except Exception:
                logger.exception("the keeper of the pool failed and goes on")

    async def _check_replicas(self) -> None:
        async with self.lock:
            answers = await self._ports.ask_members(self._mend_replica)
            seeded = [name for name, answer in answers.items() if answer is True]
            if self.target is not None:
                self._on_weights(seeded, self.target)
        for name, answer in answers.items():
            if isinstance(answer, ControlError):
                logger.warning("%s lacks the pool's weights or state: %s", name, answer)

    async def _mend_replica(self, control: WorkerControl) -> bool:
        """Give one replica what it lacks; return whether it was given weights."""
        orders, state = self._orders, await control.state()
        target = self.target
        seeded = target is not None and await self._seed_weights(target, control, state)
        if seeded:
            orders, state = self._orders, await control.state()
        if self._ordering or self._orders != orders:
            return seeded  # the state that it lacks may be on its way: look again in the next round
        held = {hold.state for hold in state.holds if hold.holder == state.caller}
        wanted = self.state
        while wanted in ("Asleep", "Paused") and wanted not in held:
            await self.change_state(control, wanted)
            if wanted == self.state:
                break
            # Another task changed it during the call, and this order may have arrived after theirs.
            wanted, held = self.state, set()
            if wanted == "Active":
                await self.change_state(control, wanted)
        return seeded

    async def _seed_weights(
        self, version: Version, control: WorkerControl, state: WorkerState
    ) -> bool:
        """Give one replica in this state the target if it has older weights; return whether it was given."""
        if not state.resident.weights or not _is_behind(state, version):
            return False
        identity = version.identity
        await control.require(RequireRequest(epoch=identity.epoch, min_version=identity.version))
        if not _has_staged(state, version):
            await self._stage_version(version, control)
        order = self._options.commit_request(identity, root_hash=version.root_hash)
        await control.commit(order)
        return True

    async def _stage_version(self, version: Version, control: WorkerControl) -> None:
        """Have one replica read the target, pushed bytes from its peers, and wait until it has."""
        identity, source = version.identity, StageSource.of(version.source)
        if version.source.pushed is not None:
            source = StageSource(pushed=PushedBytes(peers=await self._find_peers(identity)))
        request = StageRequest(
            epoch=identity.epoch,
            version=identity.version,
            source=source,
            root_hash=version.root_hash,
        )
        await control.stage(request)
        await _wait_staged(identity, control)

    async def _find_peers(self, identity: WeightsId) -> tuple[Peer, ...]:
        """Return members that offer the bytes of a pushed version, each with a ticket for one fetch.

        Raises:
            ControlError: No member keeps them.
        """
        request = OfferRequest(epoch=identity.epoch, version=identity.version)
        answers = await self._ports.ask_members(lambda control: control.offer(request))
        hosts = self._ports.member_hosts()
        found = [
            Peer(host=hosts[name], port=offer.port, ticket=offer.ticket)
            for name, offer in answers.items()
            if isinstance(offer, OfferResponse) and name in hosts
        ]
        if not found:
            why = f"no replica keeps the pushed weights {identity}"
            raise ControlError(409, "no-copy", f"{why}: the next publish brings new ones")
        return tuple(found[:MAX_PEERS])

    @contextlib.contextmanager
    def ordering_state(self, state: PoolState) -> Iterator[None]:
        """Note the state that every replica must reach, while the pool itself orders it."""
        self.state = state
        self._orders += 1
        self._ordering += 1
        self.start()
        try:
            yield
        finally:
            self._ordering -= 1

    async def change_state(self, control: WorkerControl, state: PoolState) -> None:
        """Move one replica to a state."""
        match state:
            case "Asleep":
                await control.sleep(self._options.sleep_request())
            case "Paused":
                await self._wake_replica(control)
                drain = self._options.drain_seconds
                await control.pause(PauseRequest(deadline_seconds=drain))
            case "Active":
                await self._wake_replica(control)
                await control.resume()

    async def _wake_replica(self, control: WorkerControl) -> None:
        """Wake its weights, stage the newest version, then wake the KV cache.

        In this order both versions fit into memory. Outdated weights are not read for it.
        """
        state = await control.state()
        there = state.resident.weights
        if there and state.weights.active is not None:
            await _wake_unless_held(control.wake())
            return
        behind = self.target is not None and _is_behind(state, self.target)
        empty = behind and state.wakes_empty and not state.held_by_others
        if not (empty and there):
            first = WakeRequest(tags=("weights",), load=False if empty else None)
            await _wake_unless_held(control.wake(first))
        if self.target is not None:
            await self._seed_weights(self.target, control, await control.state())
        await _wake_unless_held(control.wake(WakeRequest(tags=("kv_cache",))))


def _is_behind(state: WorkerState, version: Version) -> bool:
    """Whether a replica lacks a version; one that woke without weights lacks any."""
    active = state.weights.active
    return active is None or active.identity < version.identity


def _has_staged(state: WorkerState, version: Version) -> bool:
    """Whether a replica has these very bytes in its slot, which a trainer pushed to it while it slept."""
    found = progress_of(state, version.identity)
    return isinstance(found, Staged) and version.root_hash in (None, found.root_hash)


async def _wait_staged(identity: WeightsId, control: WorkerControl) -> None:
    """Wait until a replica has staged a version.

    Raises:
        ControlError: It can't, or took too long, or has lost it: the keeper's next round starts again.
    """
    until = time.monotonic() + SEED_TIMEOUT_SECONDS
    while time.monotonic() < until:
        match progress_of(await control.state(), identity):
            case Staged():
                return
            case Unusable(why):
                raise ControlError(409, "stage-failed", why)
            case Lost():
                raise ControlError(409, "stage-failed", "it was restarted while it staged them")
        await asyncio.sleep(POLL_SECONDS)
    raise ControlError(409, "stage-failed", "it was not staged in time")


async def _wake_unless_held(wake: Awaitable[object]) -> None:
    """Wake; if others still hold the replica, the caller's last call reports it."""
    try:
        await wake
    except ControlError as error:
        if error.slug != "held":
            raise
