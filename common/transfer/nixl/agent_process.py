"""The process that runs NIXL for another one, `agent_handle`: it registers memory, and reads from other processes.

Run as `python -m rollout_common.transfer.nixl.agent_process DESCRIPTOR`: requests and answers are JSON objects over
that socket, one a message. It may be killed at any moment, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout_common.parent_death import die_with_parent
from rollout_common.transfer.connections.descriptor_messages import (
    close_descriptors,
    receive_message,
    send_message,
)
from rollout_common.transfer.connections.frames import Ended, TransferError
from rollout_common.transfer.settings import (
    READ_LOOK_SECONDS,
    SERVE_LOOK_SECONDS,
    UNMAP_SECONDS,
)

_ZERO_PAGES = 0x10 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
"""MAP_FIXED and MAP_NORESERVE, which Python doesn't name."""


@dataclass(slots=True)
class Region:
    """Memory that is registered: where it is mapped, and NIXL's description of it."""

    mapped: mmap.mmap
    address: int
    described: Any
    is_served: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """A transfer that is not over: NIXL's handle, the number of its request, and whom it reads from."""

    transfer: Any
    request: int
    peer: int


class AgentServer:
    """Does what the other end of the socket asks for.

    Args:
        sock: The socket to the process that started this one.
        library: The name of NIXL's package.
    """

    def __init__(self, sock: socket.socket, library: str) -> None:
        api = importlib.import_module(f"{library}._api")
        # Its own thread would poll without a pause, and take a whole processor.
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = api.nixl_agent(f"rollout-{os.getpid()}-{secrets.token_hex(4)}", config)
        self._agent.create_backend("UCX", {})
        self._sock = sock
        self._regions: dict[int, Region] = {}
        self._retired: deque[tuple[float, mmap.mmap]] = deque()
        self._peers: dict[int, str] = {}
        """By the number of a holder: the name of its agent."""
        self._dropped: set[int] = set()
        """Holders that are not needed any more, but whose transfers are not over."""
        self._readings: list[Reading] = []
        self._calls: dict[str, Callable[..., Mapping[str, Any] | None]] = {
            "map": self._map_memory,
            "unmap": self._unmap_memory,
            "add": self._add_peer,
            "drop": self._drop_peer,
            "read": self._read_memory,
        }

    def run(self) -> None:
        """Serve until the other end is gone."""
        while True:
            ready, _, _ = select.select([self._sock], [], [], self._pause())
            if ready and not self._take_request():
                return
            self._agent.get_new_notifs()  # NIXL sends and receives only while it is called
            self._end_readings()
            while self._retired and self._retired[0][0] < time.monotonic():
                self._retired.popleft()[1].close()

    def _pause(self) -> float | None:
        if self._readings:
            return READ_LOOK_SECONDS
        if any(region.is_served for region in self._regions.values()):
            return SERVE_LOOK_SECONDS
        return None

    def _take_request(self) -> bool:
        try:
            request, handles = receive_message(self._sock)
        except Ended:
            return False
        try:
            answer = self._calls[request["do"]](request, *handles)
        except Exception as error:  # noqa: BLE001  # whatever NIXL raises is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            close_descriptors(handles)
        if answer is not None:
            self._send_answer(request["id"], answer)
        return True

    def _send_answer(self, request: int, answer: Mapping[str, Any]) -> None:
        send_message(self._sock, {"id": request, **answer})

    def _map_memory(self, request: Mapping[str, Any], handle: int) -> Mapping[str, Any]:
        """Register memory. Served memory is mapped to be read only, unless the network needs more to register it."""
        both = mmap.PROT_READ | mmap.PROT_WRITE
        try:
            region = self._register(handle, request, both if request["write"] else mmap.PROT_READ)
        except Exception:
            if request["write"]:
                raise
            region = self._register(handle, request, both)
        self._regions[request["region"]] = region
        told = self._agent.get_partial_agent_metadata(region.described, True, ["UCX"])
        return {"address": region.address, "agent": told.hex()}

    def _register(self, handle: int, request: Mapping[str, Any], access: int) -> Region:
        import numpy as np

        mapped = mmap.mmap(handle, request["size"], prot=access)
        address = int(np.frombuffer(mapped, dtype=np.uint8).ctypes.data)
        described = self._agent.get_reg_descs([(address, request["size"], 0, "")], "DRAM")
        self._agent.register_memory(described)
        return Region(mapped, address, described, not request["write"])

    def _unmap_memory(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        region = self._regions.pop(request["region"])
        self._agent.deregister_memory(region.described)
        # A fetcher that does not know yet may still read there: it gets zeros for a while, whose hash is wrong.
        libc = ctypes.CDLL(None, use_errno=True)
        where, size = ctypes.c_void_p(region.address), ctypes.c_size_t(len(region.mapped))
        libc.mmap(where, size, mmap.PROT_READ, _ZERO_PAGES, -1, ctypes.c_long(0))
        self._retired.append((time.monotonic() + UNMAP_SECONDS, region.mapped))
        return {}

    def _add_peer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if request["peer"] not in self._peers:
            name = self._agent.add_remote_agent(bytes.fromhex(request["agent"]))
            self._peers[request["peer"]] = name
        return {}

    def _drop_peer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if request["peer"] in self._peers:
            self._dropped.add(request["peer"])
            self._forget_dropped()
        return {}

    def _forget_dropped(self) -> None:
        for peer in self._dropped - {reading.peer for reading in self._readings}:
            self._dropped.discard(peer)
            name = self._peers.pop(peer)
            if name not in self._peers.values():
                self._agent.remove_remote_agent(name)

    def _read_memory(self, request: Mapping[str, Any]) -> None:
        """Begin to read into a region; the answer follows once that is over."""
        size, agent = request["size"], self._agent
        begin = self._regions[request["region"]].address + request["to"]
        here = agent.get_xfer_descs([(begin, size, 0)], "DRAM")
        there = agent.get_xfer_descs([(request["from"], size, 0)], "DRAM")
        transfer = agent.initialize_xfer("READ", here, there, self._peers[request["peer"]])
        agent.transfer(transfer)
        self._readings.append(Reading(transfer, request["id"], request["peer"]))

    def _end_readings(self) -> None:
        going = []
        for reading in self._readings:
            try:
                state = self._agent.check_xfer_state(reading.transfer)
                answer = {} if state == "DONE" else {"error": f"the transfer is {state}"}
            except Exception as error:  # noqa: BLE001  # the other end is gone, or refuses
                state, answer = "ERR", {"error": f"{type(error).__name__}: {error}"}
            if state == "PROC":
                going.append(reading)
                continue
            self._agent.release_xfer_handle(reading.transfer)
            self._send_answer(reading.request, answer)
        if len(going) < len(self._readings):
            self._readings = going
            self._forget_dropped()


def main() -> None:
    """Serve the process at the other end of the socket."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the other process decides
    # A copy has a low number: `select` takes none above 1023, and only it waits for less than a millisecond.
    sock = socket.socket(fileno=os.dup(int(sys.argv[1])))
    with contextlib.suppress(TransferError):  # the other process is gone
        try:
            server = AgentServer(sock, sys.argv[2])
        except Exception as error:  # noqa: BLE001  # it is for the process that started this one
            return send_message(sock, {"id": 0, "error": f"{type(error).__name__}: {error}"})
        send_message(sock, {"id": 0})
        server.run()


if __name__ == "__main__":
    main()
