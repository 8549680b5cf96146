"""Trainers lend tensors and their turn to a worker that sleeps on the same devices: from device to device.

Each process of a trainer connects to a socket in the lock directory, proves by its lock files that it has the turn, and
says on which devices it has the tensors. Once the turn is lent for all of this worker's devices, the weights wake without
values and each process of the engine gets a lane to the trainer's process on its device (`lent_reading`). What was read is
staged like any other version. The KV cache wakes once the trainer has left the turn to this worker.

If the trainer ends before it has left, the engine is ended, too: only that proves that no memory is used outside of a turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import socket
import time
from pathlib import Path

import xxhash

from rollout_common.transfer.connections.descriptor_messages import (
    LENDING_PROTOCOL,
    MAX_REASON,
    SOCKET_PREFIX,
    close_descriptors,
    make_socket,
    send_message,
)
from rollout_common.transfer.connections.frames import Malformed, TransferError
from rollout_common.transfer.connections.transfer_loop import TaskSet
from rollout_common.turn import TurnError
from rollout_common.turn.lock_files import LockFile
from rollout_common.wire import (
    Lifecycle,
    PushedBytes,
    StagedWeights,
    StageRequest,
    StageSource,
)
from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import EngineError, LentTensors, WeightsLayout
from rollout_worker.service import WorkerService

from .borrowed_version import (
    BACKLOG,
    BorrowedVersion,
    Lender,
    accepted,
    follow_lender,
    next_message,
)
from .settings import (
    LENDER_GREETING_SECONDS,
    LENDERS_SECONDS,
    LENDING_LOOK_SECONDS,
    LENT_IDLE_SECONDS,
)

logger = logging.getLogger(__name__)

LENDER = "lender"
"""The caller that stages what a trainer lends."""


class LendingFailed(Exception):
    """A version can't be lent; the text says why and what to do."""


class LendingPort:
    """The socket of one worker in the lock directory; only where it takes turns."""

    def __init__(self, worker: WorkerService) -> None:
        self._worker, settings = worker, worker.settings
        assert settings.turn_directory is not None, "it takes turns"
        self._devices = tuple(settings.turn_devices)
        mark = xxhash.xxh3_64_hexdigest(
            f"{settings.turn_holder} {self._devices} {os.getpid()}".encode()
        )
        self._path = settings.turn_directory / f"{SOCKET_PREFIX}{mark}"
        self._tasks = TaskSet()
        self._version: BorrowedVersion | None = None

    async def serve(self) -> None:
        """Serve trainers until cancelled."""
        try:
            listener = self._listen()
        except OSError as error:
            logger.warning("trainers can't lend device memory to this worker: %s", error)
            return
        try:
            with listener:
                async for connected in accepted(listener):
                    self._tasks.start_task(self._serve_lender(connected))
        finally:
            self._path.unlink(missing_ok=True)
            await self._tasks.end_tasks()

    def _listen(self) -> socket.socket:
        for path in self._path.parent.glob(f"{SOCKET_PREFIX}*"):
            _remove_dead_socket(path)
        sock = make_socket()
        try:
            sock.setblocking(False)
            sock.bind(str(self._path))
            self._path.chmod(0o666)  # a trainer may run as another user
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
        return sock

    async def _serve_lender(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(TransferError, OSError):
            sock.setblocking(False)
            self._greet_lender(sock)
            head, handles = await next_message(sock, LENDER_GREETING_SECONDS)
            try:
                lender = Lender(sock, head, handles)
                self._check_locks(lender)
                version = self._join_version(lender)
            except (LendingFailed, Malformed, TurnError, OSError) as error:
                close_descriptors(handles)
                send_message(sock, {"failed": str(error)})
                send_message(sock, {"returned": True})
                return
            try:
                await follow_lender(lender, version)
                if lender.withdrew:
                    await self._return_turn(lender, version)
            finally:
                self._worker.runtime.changed.notify_all()
                if version.given is None:
                    await self._drop_lender(lender, version)

    def _check_locks(self, lender: Lender) -> None:
        """Refuse a process that does not have the turn for its devices before it keeps others out."""
        directory = self._worker.settings.turn_directory
        assert directory is not None, "it takes turns"
        for device, pair in lender.files.items():
            if device not in self._devices:
                raise LendingFailed(f"{device} is not this worker's")
            LockFile.adopt(directory, device, pair)

    def _greet_lender(self, sock: socket.socket) -> None:
        """Say who this worker is, and which tensors its model needs."""
        settings, info = self._worker.settings, self._worker.runtime.info
        about = {
            "protocol": LENDING_PROTOCOL,
            "holder": settings.turn_holder,
            "pool": settings.pool,
            "devices": self._devices,
        }
        if info is None:
            send_message(sock, about)
            return
        with open(os.memfd_create("rollout-layout", os.MFD_CLOEXEC), "wb", buffering=0) as file:
            file.write(_encode_layout(info.layout))
            send_message(sock, about, [file.fileno()])

    async def _return_turn(self, lender: Lender, version: BorrowedVersion) -> None:
        """Tell a process of a trainer, which keeps its turn, once nobody here shares it any more."""
        if version.given is None:
            await self._drop_lender(lender, version)
        else:
            self._worker.runtime.changed.notify_all()
            await version.over.wait()
        send_message(lender.sock, {"returned": True})

    async def _drop_lender(self, lender: Lender, version: BorrowedVersion) -> None:
        """Let another process take the place of one that went before all had come."""
        if lender in version.lenders:
            version.lenders.remove(lender)
        if not version.lenders and self._version is version:
            self._version = None
            await version.close()

    def _join_version(self, lender: Lender) -> BorrowedVersion:
        """Return the version that a process of a trainer lends; the last process begins its loading."""
        self._check_borrows()
        version = self._version or BorrowedVersion(lender.identity, lender.seconds)
        if version.identity != lender.identity or version.given is not None:
            raise LendingFailed(
                f"weights {version.identity} are being lent to this worker: all processes of the trainer lend the same"
                " version, once"
            )
        if version.devices & set(lender.files):
            raise LendingFailed(f"the turn of {', '.join(lender.files)} was lent already")
        gpus = set(lender.memory) - {"cpu"}
        if twice := next(
            (gpu for each in version.lenders for gpu in gpus & set(each.memory)), None
        ):
            raise LendingFailed(
                f"two processes of the trainer have memory of {twice}: let each see its own devices alone"
            )
        if self._version is None:
            self._version = version
            self._tasks.start_task(self._await_lenders(version))
        version.lenders.append(lender)
        if version.devices == set(self._devices):
            info = self._worker.runtime.info
            assert info is not None, "an engine is loaded"
            version.given = LentTensors(version.open_lanes, version.read_root, info.layout)
            self._tasks.start_task(self._run_version(version, version.given))
        return version

    def _check_borrows(self) -> None:
        """Refuse to borrow unless the engine is all asleep."""
        runtime = self._worker.runtime
        if runtime.gang is not None:
            raise LendingFailed("a replica of several nodes takes no lent tensors: publish them")
        state = runtime.lifecycle.current_state
        if runtime.engine is None and state is Lifecycle.ASLEEP:
            raise LendingFailed(
                "the worker sleeps without an engine, which ended before: it loads one when the pool wakes"
            )
        if state is not Lifecycle.ASLEEP or not runtime.hold_target().is_all_released:
            raise LendingFailed(
                f"the worker is {state.value}, and reads lent tensors only while all of it sleeps: lend inside pool.turn()"
            )

    async def _await_lenders(self, version: BorrowedVersion) -> None:
        """Give a version up whose processes don't all come: the others wait in the trainer's collectives."""
        await asyncio.sleep(LENDERS_SECONDS)
        if version.given is None and self._version is version:
            self._version = None
            lacking = ", ".join(sorted(set(self._devices) - version.devices))
            why = f"no process of the trainer has lent {lacking} within {LENDERS_SECONDS:g} s: each rank calls hand_over"
            version.tell_lenders({"failed": why})
            await version.close()

    async def _run_version(self, version: BorrowedVersion, given: LentTensors) -> None:
        """Load a version, and follow it until the worker wakes with it or nobody here shares the turn any more."""
        runtime = self._worker.runtime
        try:
            try:
                staged = await self._load_version(version, given)
                version.tell_lenders({"staged": staged.root_hash})
            except Exception as error:
                known = (ProblemError, EngineError, TurnError, LendingFailed)
                logger.warning(
                    "weights %s were not lent: %s",
                    version.identity,
                    error,
                    exc_info=not isinstance(error, known),
                )
                version.tell_lenders({"failed": str(error)[:MAX_REASON] or type(error).__name__})
                version.cut_lanes()
                self._end_lending()
            await self._watch_version(version)
        finally:
            self._version = None
            await version.close()
            runtime.changed.notify_all()

    def _end_lending(self) -> None:
        """Let the weights fall asleep again."""
        self._worker.runtime.holds.lending = False
        self._worker.runtime.changed.notify_all()

    async def _load_version(self, version: BorrowedVersion, given: LentTensors) -> StagedWeights:
        """Wake the weights without values in the trainer's turn, and stage what it lends."""
        worker, identity = self._worker, version.identity
        runtime, turn = worker.runtime, worker.runtime.turn
        assert turn is not None
        logger.info("taking weights %s from a trainer on the same devices", identity)
        files = {device: pair for each in version.lenders for device, pair in each.files.items()}
        turn.adopt_turn({d: (os.dup(file), os.dup(keeper)) for d, (file, keeper) in files.items()})
        runtime.holds.lending = True
        runtime.changed.notify_all()
        await worker.governor.wait_until(
            lambda: runtime.engine_stats().resident.weights,
            version.seconds,
            lambda: runtime.holds.lending and not version.is_lost,
        )
        request = StageRequest(
            epoch=identity.epoch,
            version=identity.version,
            source=StageSource(pushed=PushedBytes()),
            deadline_seconds=version.seconds,
        )
        await worker.updates.stage_weights(LENDER, request, given)
        try:
            return await self._await_staged(version, given)
        except BaseException:
            info = runtime.info
            if info is not None and info.by_path:
                # Nobody may have heard how its processes ended what was cut off: they have halves of two versions.
                runtime.report_crash("lent weights were not read whole")
            raise

    async def _await_staged(self, version: BorrowedVersion, given: LentTensors) -> StagedWeights:
        """Return the slot once it is staged."""
        while True:
            slot = self._worker.updates.slot
            if slot is None or slot.given is not given:
                raise LendingFailed(
                    f"weights {version.identity} were discarded, or are staged from elsewhere: use a higher version"
                )
            view = slot.to_view()
            if view.error is not None:
                raise LendingFailed(view.error)
            if view.phase == "Staged":
                return view
            await self._worker.runtime.changed.wait_for_change(version.seconds)

    async def _watch_version(self, version: BorrowedVersion) -> None:
        """Follow a version until the worker wakes with it, or its weights are asleep again."""
        runtime, updates, left_at = self._worker.runtime, self._worker.updates, math.inf
        turn = runtime.turn
        assert turn is not None
        while turn.is_lent and (runtime.holds.lending or not turn.lender_left.is_set()):
            if version.is_lost:
                turn.is_lender_lost = True
                runtime.report_crash("the trainer that lent its turn has ended before it left it")
            elif version.is_left and not turn.lender_left.is_set():
                turn.note_lender_left()
                left_at = time.monotonic()
            if version.is_withdrawn or (updates.slot is None and updates.empty):  # discarded
                self._end_lending()
            if turn.is_in_the_way and time.monotonic() > left_at + LENT_IDLE_SECONDS:
                logger.warning(
                    "giving up weights %s: others wait for the devices", version.identity
                )
                self._end_lending()
            await runtime.changed.wait_for_change(LENDING_LOOK_SECONDS)


def _encode_layout(layout: WeightsLayout) -> bytes:
    """Return as JSON what a version must have and may have."""
    described = {
        kind: {name: (spec.dtype, spec.shape) for name, spec in specs.items()}
        for kind, specs in (("required", layout.required), ("optional", layout.optional))
    }
    return json.dumps(described).encode()


def _remove_dead_socket(path: Path) -> None:
    """Remove the socket of a worker that was killed; one of another user may have to stay."""
    with make_socket() as sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
