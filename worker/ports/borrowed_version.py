"""One version that processes of a trainer lend to a worker, and their connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from rollout_common.transfer.connections.descriptor_messages import (
    LENDING_PROTOCOL,
    close_descriptors,
    make_socket,
    receive_message,
    send_message,
)
from rollout_common.transfer.connections.frames import Malformed, Silent, TransferError
from rollout_common.transfer.connections.transfer_loop import TaskSet
from rollout_common.wire import WeightsId
from rollout_worker.engine import EngineError, LentTensors

from .settings import (
    LENDER_GREETING_SECONDS,
    MAX_LENDING_SECONDS,
    WEIGHTS_ACCEPT_RETRY_SECONDS,
)

logger = logging.getLogger(__name__)

BACKLOG = 64


class Lender:
    """One process of a trainer: what it says of itself, and its connection."""

    def __init__(self, sock: socket.socket, head: Mapping[str, Any], handles: list[int]) -> None:
        try:
            if head["protocol"] != LENDING_PROTOCOL:
                raise Malformed(
                    f"this worker speaks protocol {LENDING_PROTOCOL}: use its release of the client"
                )
            self.identity = WeightsId(epoch=head["epoch"], version=head["version"])
            self.seconds = min(float(head["seconds"]), MAX_LENDING_SECONDS)
            if not self.seconds > 0:
                raise Malformed("seconds must be above 0")
            self.memory = [str(each) for each in head["memory"]]
            """Identities of the devices that it has the tensors on."""
            devices = [str(each) for each in head["devices"]]
            if not devices or len(set(devices)) != len(devices):
                raise Malformed("it names no device, or one twice")
            pairs = list(zip(handles[::2], handles[1::2], strict=True))
            self.files = dict(zip(devices, pairs, strict=True))
            """By device: the descriptors of its lock."""
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Malformed(f"this is not what a trainer offers: {error}") from error
        self.sock = sock
        self.root: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.left = self.lost = self.withdrew = False

    def tell(self, head: Mapping[str, Any]) -> None:
        """Send it a message; one that is gone needs none."""
        with contextlib.suppress(TransferError, OSError):
            send_message(self.sock, head)

    def fail_root(self, error: TransferError) -> None:
        """Note that it lends no more, unless it has lent everything."""
        if not self.root.done():
            self.root.set_exception(error)
            self.root.exception()  # retrieved: perhaps nobody waits for it


class BorrowedVersion:
    """One version that processes of a trainer lend, and the lanes of the engine's processes to them."""

    def __init__(self, identity: WeightsId, seconds: float) -> None:
        self.identity, self.seconds = identity, seconds
        self.lenders: list[Lender] = []
        self.given: LentTensors | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="rollout-lend-"))
        self._tasks = TaskSet()
        self._missing_lanes = 0
        self._lanes: list[socket.socket] = []
        """The engine's ends of the lanes, by which they can be cut."""
        self.over = asyncio.Event()
        """Set once no trainer's turn is shared for it any more, or the trainer has left that turn."""

    @property
    def devices(self) -> set[str]:
        """The devices whose turn is lent."""
        return {device for each in self.lenders for device in each.files}

    @property
    def is_lost(self) -> bool:
        """Whether a process of the trainer has ended, or its connection, before it left the turn."""
        return any(each.lost for each in self.lenders)

    @property
    def is_withdrawn(self) -> bool:
        """Whether the trainer keeps its turn, and lends this version no more."""
        return any(each.withdrew for each in self.lenders)

    @property
    def is_left(self) -> bool:
        """Whether all processes of the trainer have left the turn."""
        return all(each.left for each in self.lenders)

    def open_lanes(self, ranks: int) -> str:
        """Wait for this many processes of the engine; return where they get their lanes."""
        self._missing_lanes = ranks
        path = self._folder / "lanes"
        sock = make_socket()
        sock.setblocking(False)
        sock.bind(str(path))
        sock.listen(BACKLOG)
        self._tasks.start_task(self._accept_ranks(sock))
        return str(path)

    async def _accept_ranks(self, listener: socket.socket) -> None:
        with listener:
            async for connected in accepted(listener):
                self._tasks.start_task(self._pass_lane(connected))

    async def _pass_lane(self, sock: socket.socket) -> None:
        """Connect one process of the engine with the trainer's process on its device."""
        with sock, contextlib.suppress(TransferError):
            head, handles = await next_message(sock, LENDER_GREETING_SECONDS)
            close_descriptors(handles)
            device = str(head.get("device"))
            lender = next((each for each in self.lenders if device in each.memory), None)
            if lender is None:
                have = ", ".join(sorted({name for each in self.lenders for name in each.memory}))
                send_message(
                    sock, {"error": f"the engine is on {device}, the trainer lends on {have}"}
                )
                return
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._lanes.append(ours)
            with theirs:
                send_message(lender.sock, {"lane": device}, [theirs.fileno()])
                answer = {"lane": device, "seconds": self.seconds}
                send_message(sock, answer, [ours.fileno()])
            self._missing_lanes -= 1
            if not self._missing_lanes:
                self.tell_lenders({"start": True})

    def cut_lanes(self) -> None:
        """End what engine and trainer say to each other."""
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            with contextlib.suppress(OSError):
                lane.shutdown(socket.SHUT_RDWR)
            lane.close()

    async def read_root(self) -> str:
        """Return the root hash once all of it was read.

        Raises:
            EngineError: It was not, or processes of the trainer had different tensors.
        """
        try:
            async with asyncio.timeout(self.seconds):
                roots = await asyncio.gather(*(asyncio.shield(each.root) for each in self.lenders))
        except TimeoutError:
            raise EngineError(
                f"the trainer did not lend all of it within {self.seconds:g} s"
            ) from None
        except TransferError as error:
            raise EngineError(f"the trainer has stopped lending: {error}") from error
        if len(set(roots)) > 1:
            raise EngineError(
                "the trainer's processes lend different tensors: gather each whole on all ranks"
            )
        return roots[0]

    def tell_lenders(self, head: Mapping[str, Any]) -> None:
        """Send a message to all processes of the trainer that are there."""
        for lender in self.lenders:
            lender.tell(head)

    async def close(self) -> None:
        """Pass no more lanes, and end the reading: an engine would wait for a trainer that is stopped."""
        self.over.set()
        await self._tasks.end_tasks()
        self.cut_lanes()
        shutil.rmtree(self._folder, ignore_errors=True)


async def follow_lender(lender: Lender, version: BorrowedVersion) -> None:
    """Note what a process of a trainer says until it has left the turn.

    Raises:
        TransferError: It is gone.
    """
    try:
        while not (lender.left or lender.withdrew):
            head, handles = await next_message(lender.sock, None)
            close_descriptors(handles)
            if "all" in head and not lender.root.done():
                lender.root.set_result(str(head["all"]))
            elif "failed" in head:
                lender.fail_root(Malformed(str(head["failed"])))
            # One that has failed before all had come may come again, and the others wait for it.
            came_alone = version.given is None and "failed" in head
            lender.left, lender.withdrew = "left" in head, "withdrawn" in head or came_alone
    except TransferError as error:
        lender.lost = True
        lender.fail_root(error)
        raise
    finally:
        close_descriptors([file for pair in lender.files.values() for file in pair])
        lender.files = {}


async def accepted(listener: socket.socket) -> AsyncIterator[socket.socket]:
    """Yield the connections of a listener, whatever goes wrong with one of them."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            connected, _ = await loop.sock_accept(listener)
        except OSError as error:  # perhaps no descriptor is left
            logger.warning("a connection could not be taken: %s", error)
            await asyncio.sleep(WEIGHTS_ACCEPT_RETRY_SECONDS)
        else:
            yield connected


async def next_message(
    sock: socket.socket, seconds: float | None
) -> tuple[dict[str, Any], list[int]]:
    """Return the next message of a socket that does not block; waits for it for these seconds, or (None) without limit.

    Raises:
        TransferError: There is none.
    """
    while True:
        with contextlib.suppress(Silent):
            return receive_message(sock)
        try:
            async with asyncio.timeout(seconds):
                await _wait_readable(sock)
        except TimeoutError:
            raise Silent(f"no message came within {seconds:g} s") from None


async def _wait_readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        # Also if it is cancelled: the number of a closed socket is used again.
        loop.remove_reader(sock)
