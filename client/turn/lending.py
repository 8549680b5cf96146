"""A trainer lends its tensors to engines that sleep on its devices: bucket by bucket, from device to device.

Every process of the trainer lends on its own devices, where engines read all tensors and keep their parts. An engine
shares the trainer's turn for that (`rollout_common.turn`), and goes on with it once the trainer has left it. What the
messages say is in `rollout_worker.ports.lending_port` and `rollout_worker.engines.shared_memory.lent_reading`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_client.errors import PublishFailed
from rollout_client.steering.pushing.push_tensors import given
from rollout_common.transfer.connections.descriptor_messages import (
    LENDING_PROTOCOL,
    MAX_REASON,
    SOCKET_PREFIX,
    close_descriptors,
    dial_messages,
    receive_message,
    send_message,
)
from rollout_common.transfer.connections.frames import Ended, TransferError
from rollout_common.transfer.memory.exported_memory import ExportError, device_identity
from rollout_common.turn import Turn, TurnError

from .bucket_stream import BucketStream, Layout, TensorCheck, check_specs, seconds_left
from .settings import BORROWER_SECONDS, LOAN_END_SECONDS, REASON_SECONDS

if TYPE_CHECKING:
    from rollout_client.steering.spool import Tensors

logger = logging.getLogger(__name__)

BUCKET_BYTES = 256 << 20
MAX_LAYOUT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class LentVersion:
    """Weights that engines have read: give them to `pool.publish_handed_over`.

    Attributes:
        epoch: The trainer's.
        version: The weights version.
        root_hash: Identifies their content.
    """

    epoch: int
    version: int
    root_hash: str


@dataclass(slots=True)
class Borrower:
    """A worker whose engine shares the turn, or is about to.

    `devices`: its devices. `layouts`: what it needs and what it takes, too; None: it has no model. `is_staged`: whether it
    has read a version, and keeps the turn with it.
    """

    name: str
    pool: str | None
    sock: socket.socket
    devices: tuple[str, ...]
    layouts: tuple[Layout, Layout] | None
    is_staged: bool = False

    @classmethod
    def greet(cls, sock: socket.socket) -> Borrower:
        """Return the worker at the other end.

        Raises:
            TransferError: It does not say what it is.
            PublishFailed: It says so in a way that this release does not know.
        """
        told, handles = receive_message(sock)
        try:
            if told.get("protocol") != LENDING_PROTOCOL:
                raise PublishFailed(
                    "its release lends in another way: use the client of that release"
                )
            layouts = None if not handles else _read_layouts(handles[0])
            return cls(str(told["holder"]), told["pool"], sock, tuple(told["devices"]), layouts)
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise PublishFailed(f"a worker says what no worker says: {error}") from error
        finally:
            close_descriptors(handles)

    def close(self) -> None:
        """End the connection, also for processes that were forked while it was open."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def receive(self, until: float) -> tuple[dict[str, Any], list[int]]:
        """Return the next message.

        Raises:
            PublishFailed: It says that it failed, is gone, or late.
        """
        self.sock.settimeout(seconds_left(until))
        try:
            head, handles = receive_message(self.sock)
        except TransferError as error:
            raise PublishFailed(f"it does not answer: {error}", replica=self.name) from error
        if "failed" in head:
            close_descriptors(handles)
            raise PublishFailed(str(head["failed"]), replica=self.name)
        return head, handles

    def await_word(self, word: str, seconds: float) -> str | None:
        """Return what it says by this word; None: it is gone, or does not say it in time."""
        until = time.monotonic() + seconds
        with contextlib.suppress(TransferError):
            while (left := until - time.monotonic()) > 0:
                self.sock.settimeout(left)
                head, handles = receive_message(self.sock)
                close_descriptors(handles)
                if word in head:
                    return str(head[word])
        return None

    def tell(self, head: Mapping[str, Any]) -> None:
        """Send a message; one that is gone needs none."""
        with contextlib.suppress(TransferError):
            send_message(self.sock, head)


@dataclass(slots=True)
class Loans:
    """What one turn lends: the workers that share it, and the version that is being lent to them."""

    _borrowers: list[Borrower] = field(default_factory=list)
    _lanes: dict[str, list[socket.socket]] = field(default_factory=dict)
    """By torch's device: one for each process of an engine on it."""
    _busy: threading.Lock = field(default_factory=threading.Lock)

    def hand_over(
        self,
        directory: Path,
        turn: Turn,
        asked: LentVersion,
        tensors: Tensors,
        *,
        pool: str | None,
        seconds: float,
        bucket_bytes: int,
    ) -> LentVersion:
        """Lend tensors, as `HeldTurn.hand_over` does."""
        found = given(tensors)
        if isinstance(found.items, AsyncIterable):
            raise TypeError("lend a model, a state dict or a plain generator")
        began, items = time.monotonic(), iter(found.items)
        if not self._busy.acquire(blocking=False):
            raise PublishFailed("another hand_over of this turn has not ended")
        try:
            try:
                turn.check_lendable()
                self._take_back(turn)
                self._find_borrowers(directory, turn.devices, pool, min(seconds, BORROWER_SECONDS))
                layouts = [each.layouts for each in self._borrowers if each.layouts is not None]
                for each in layouts if found.specs is not None else ():
                    check_specs(found.specs or (), *each)
                self._open_lanes(turn, asked, began + seconds)
                checks = [TensorCheck(*each) for each in layouts]
                stream = BucketStream(self._lanes, checks, bucket_bytes, began + seconds)
                with contextlib.closing(stream):
                    for name, tensor in items:
                        stream.add_tensor(name, tensor)
                    root_hash = stream.finish()
                self._await_staged(root_hash, began + seconds)
            except (TransferError, ExportError, TurnError) as error:
                why = self._failure_told(began + seconds) or str(error)
                raise PublishFailed(f"weights {asked.version} were not lent: {why}") from error
        except BaseException as error:
            for borrower in self._borrowers:
                borrower.tell({"failed": str(error)[:MAX_REASON]})
            for _ in items:  # other ranks wait in the gathers
                pass
            raise
        finally:
            self._close_lanes()
            self._busy.release()
        rate = stream.nbytes / max(1e-9, time.monotonic() - began) / 1e9
        names = ", ".join(each.name for each in self._borrowers)
        logger.info("lent %d bytes to %s, %.1f GB/s", stream.nbytes, names, rate)
        return replace(asked, root_hash=root_hash)

    def _find_borrowers(
        self, directory: Path, devices: Collection[str], pool: str | None, seconds: float
    ) -> None:
        """Connect to the workers on these devices."""
        used: dict[str, str] = {}
        strange = ""
        for path in sorted(directory.glob(f"{SOCKET_PREFIX}*")):
            try:
                sock = dial_messages(path, seconds)
            except Ended:  # of a worker that is gone
                continue
            try:
                each = Borrower.greet(sock)
            except (TransferError, PublishFailed) as error:  # perhaps on other devices
                sock.close()
                strange += f"; {path.name}: {error}"
                continue
            except BaseException:
                sock.close()
                raise
            mine = [device for device in each.devices if device in devices]
            if not mine or pool not in (None, each.pool):
                sock.close()
                continue
            self._borrowers.append(each)
            name = f"{each.name} of pool {each.pool}"
            if twice := next((used[device] for device in mine if device in used), None):
                raise PublishFailed(f"{twice} and {name} sleep on the same device: say whose pool=")
            used.update(dict.fromkeys(mine, name))
        if lacking := sorted(set(devices) - used.keys()):
            raise PublishFailed(
                f"no engine sleeps on {', '.join(lacking)}: lend inside pool.turn(), to workers of this release that mount"
                f" the same lock directory{strange}"
            )

    def _open_lanes(self, turn: Turn, asked: LentVersion, until: float) -> None:
        """Offer the version to the workers, with the turn, and get a lane to each process of their engines."""
        memory = dict(_memory_identities(len(turn.devices)))
        files = turn.lend_files()
        for each in self._borrowers:
            mine = [device for device in each.devices if device in files]
            offer = {
                "protocol": LENDING_PROTOCOL,
                "epoch": asked.epoch,
                "version": asked.version,
                "seconds": seconds_left(until),
                "devices": mine,
                "memory": list(memory),
            }
            send_message(each.sock, offer, [file for device in mine for file in files[device]])
        for each in self._borrowers:
            head: dict[str, Any] = {}
            while "start" not in head:
                head, handles = each.receive(until)
                if "lane" in head and handles:
                    lane = socket.socket(fileno=handles.pop(0))
                    self._lanes.setdefault(memory[head["lane"]], []).append(lane)
                close_descriptors(handles)

    def _await_staged(self, root_hash: str, until: float) -> None:
        for each in self._borrowers:
            each.tell({"all": root_hash})
        for each in self._borrowers:
            head: dict[str, Any] = {}
            while "staged" not in head:
                head, handles = each.receive(until)
                close_descriptors(handles)
            if head["staged"] != root_hash:
                raise PublishFailed(
                    f"it has {head['staged']}, and {root_hash} was sent", replica=each.name
                )
            each.is_staged = True

    def _failure_told(self, until: float) -> str | None:
        """Return why a worker says that it failed, which it knows a moment after its engine has ended a lane."""
        until = min(until, time.monotonic() + REASON_SECONDS)
        told = (each.await_word("failed", seconds_left(until)) for each in self._borrowers)
        return next(filter(None, told), None)

    def _close_lanes(self) -> None:
        for lane in self._open_sockets():
            with contextlib.suppress(OSError):
                lane.shutdown(socket.SHUT_RDWR)  # a child that was forked since then has it, too
            lane.close()
        self._lanes = {}

    def _take_back(self, turn: Turn) -> None:
        """Have all workers let go of the turn; it is this process's alone again if all of them say that they have."""
        borrowers, self._borrowers = self._borrowers, []
        for each in borrowers:
            each.tell({"withdrawn": True})
        returned = [each.await_word("returned", LOAN_END_SECONDS) for each in borrowers]
        for each in borrowers:
            each.close()
        if None not in returned:
            turn.end_loan()

    def give_turn(self, turn: Turn) -> None:
        """Give the turn back, or leave it to the workers that have read a version; it stays while a thread still lends."""
        with self._ended() as ended:
            if not ended:
                return
            staged = [each for each in self._borrowers if each.is_staged]
            if len(staged) < len(self._borrowers):
                staged = []  # either all engines have the version, or none keeps it
                self._take_back(turn)
            turn.give()
            for each in staged:
                each.tell({"left": True})
                each.close()
            self._borrowers = []

    def take_back(self, turn: Turn) -> None:
        """Have the engines give their memory back: the block has failed, and this process keeps the turn."""
        with self._ended() as ended:
            if ended:
                self._take_back(turn)

    @contextlib.contextmanager
    def _ended(self) -> Iterator[bool]:
        """Yield whether nothing is being lent any more; a thread that still lends is cut off."""
        if self._busy.locked():
            for sock in [*(each.sock for each in self._borrowers), *self._open_sockets()]:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        ended = self._busy.acquire(timeout=LOAN_END_SECONDS)
        if not ended:
            logger.error("a hand_over goes on after its turn, which stays with this process")
        try:
            yield ended
        finally:
            if ended:
                self._busy.release()

    def _open_sockets(self) -> list[socket.socket]:
        return [lane for lanes in list(self._lanes.values()) for lane in lanes]


def _read_layouts(handle: int) -> tuple[Layout, Layout]:
    """Return the layouts that are in a file without a name."""
    size = os.fstat(handle).st_size
    if size > MAX_LAYOUT_BYTES:
        raise ValueError(f"a layout of {size} bytes")
    found = json.loads(os.pread(handle, size, 0))
    return found["required"], found["optional"]


def _memory_identities(devices: int) -> Iterator[tuple[str, str]]:
    """Yield identity and torch's name of the devices that this process can lend memory of.

    A rank that locks one device computes on its current one; a process that locks several, on all that it sees.
    """
    import torch

    yield device_identity("cpu"), "cpu"
    if torch.cuda.is_available():
        one = devices == 1
        for index in [torch.cuda.current_device()] if one else range(torch.cuda.device_count()):
            yield device_identity(f"cuda:{index}"), f"cuda:{index}"
