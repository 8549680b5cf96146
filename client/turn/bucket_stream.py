"""Buckets of tensors in device memory, which processes of engines on the same device read."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollout_client.errors import PublishFailed
from rollout_client.steering.plain_tensors import Spec, check_readable, spec_of
from rollout_common.transfer.connections.descriptor_messages import (
    close_descriptors,
    receive_message,
    send_message,
)
from rollout_common.transfer.memory.exported_memory import ExportedMemory
from rollout_common.transfer.tensor_sums import root_of_sums, sum_tensors

if TYPE_CHECKING:
    from torch import Tensor

BUFFERS = 2
"""Buckets on each device: one is filled while engines read the other."""
ALIGNMENT = 512
"""Each tensor begins at a multiple of this in its bucket: what any dtype and vector copy wants."""
MAX_TENSORS = 512
"""Most tensors of a bucket: the message that names them has a bound."""

Layout = Mapping[str, Sequence[Any]]
"""Dtype, as safetensors call it, and shape of tensors by name."""


class TensorCheck:
    """Compares what is lent with what an engine takes, before the engine has anything of it.

    Args:
        required: What it needs.
        optional: What it takes, too.
    """

    def __init__(self, required: Layout, optional: Layout) -> None:
        self._required, self._known = required, {**optional, **required}
        self._came: set[str] = set()

    def note_tensor(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Check a tensor that comes.

        Raises:
            PublishFailed: The engine does not take it.
        """
        if name not in self._known:
            raise PublishFailed(
                f"tensor {name!r} is unknown to the model: lend the tensors of its checkpoint under their names, and"
                " nothing else"
            )
        wanted, sizes = self._known[name]
        if (dtype, list(shape)) != (wanted, list(sizes)):
            raise PublishFailed(
                f"tensor {name!r} is {dtype} {list(shape)}, the model's checkpoint has {wanted} {sizes}: lend it so"
            )
        if name in self._came:
            raise PublishFailed(f"tensor {name!r} came twice: lend it once")
        self._came.add(name)

    def check_missing(self) -> None:
        """Check that all has come.

        Raises:
            PublishFailed: Something is missing.
        """
        if missing := next((name for name in self._required if name not in self._came), None):
            raise PublishFailed(
                f"tensor {missing!r} is missing: lend every tensor of the model's checkpoint"
            )


class BucketStream:
    """Fills buckets with tensors, on each device that has lanes, and sends them.

    Args:
        lanes: By torch's device: one for each process of an engine on it.
        checks: One for each engine's layout.
        nbytes: Size of a bucket; one tensor that is larger has one of its size.
        until: Deadline on the monotonic clock.
    """

    def __init__(
        self,
        lanes: Mapping[str, list[socket.socket]],
        checks: Sequence[TensorCheck],
        nbytes: int,
        until: float,
    ) -> None:
        # A process that no engine reads from says what it has, too: all ranks must have the same.
        self._lanes, self._checks = lanes or {"cpu": []}, checks
        self._size, self._until = nbytes, until
        self._buffers: dict[tuple[str, int], ExportedMemory] = {}
        self._sent: set[tuple[str, int]] = set()
        """The buffers that the engines have mapped."""
        self._busy: set[int] = set()
        """The buffers that the engines may still read."""
        self._current = self._used = self.nbytes = 0
        self._rows: list[list[Any]] = []
        self._sums: list[tuple[str, str, Sequence[int], str]] = []

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor into the current bucket, and send that first if it is full."""
        name, dtype, shape = spec_of(name, tensor)
        check_readable(name, tensor)
        for check in self._checks:
            check.note_tensor(name, dtype, shape)
        source = tensor.detach()
        size = source.numel() * source.element_size()
        if self._rows and (self._used + size > self._size or len(self._rows) == MAX_TENSORS):
            self._send_bucket()
        begin = self._used
        self._used = -(-(begin + size) // ALIGNMENT) * ALIGNMENT
        for device in self._lanes:
            room = self._buffer_of(device, self._used).as_tensor()[begin : begin + size]
            room.view(source.dtype).view(shape).copy_(source)
        self._rows.append([name, dtype, list(shape), begin, size])
        self.nbytes += size

    def _buffer_of(self, device: str, least: int) -> ExportedMemory:
        """Return the current buffer of a device, of at least this size."""
        key = device, self._current
        buffer = self._buffers.get(key)
        if buffer is None or buffer.nbytes < least:
            if buffer is not None:
                self._buffers.pop(key).close()
                self._sent.discard(key)
            size = -(-max(self._size, least) // ALIGNMENT) * ALIGNMENT
            buffer = self._buffers[key] = ExportedMemory.allocate(device, size)
        return buffer

    def _send_bucket(self) -> None:
        """Send the current bucket, and wait until the next one may be filled."""
        sums = self._sum_bucket()
        rows = [[*row[:4], total] for row, total in zip(self._rows, sums, strict=True)]
        self._sums += [(name, dtype, shape, total) for name, dtype, shape, _, total in rows]
        for device, lanes in self._lanes.items():
            key = device, self._current
            head = {"buffer": self._current, "nbytes": self._buffers[key].nbytes, "tensors": rows}
            handles = [] if key in self._sent else [self._buffers[key].handle]
            self._sent.add(key)
            for lane in lanes:
                lane.settimeout(seconds_left(self._until))
                send_message(lane, head, handles)
        self._busy.add(self._current)
        self._rows, self._used = [], 0
        self._current = (self._current + 1) % BUFFERS
        self._await_read(self._current)

    def _sum_bucket(self) -> list[str]:
        """Return the sums of the bucket's tensors, once they are copied: to all devices alike."""
        found: list[str] = []
        for device in self._lanes:
            whole = self._buffers[device, self._current].as_tensor()
            sums = sum_tensors([whole[begin : begin + size] for *_, begin, size in self._rows])
            if found and sums != found:
                raise PublishFailed(f"what was copied to {device} differs from its source")
            found = sums
        return found

    def _await_read(self, buffer: int) -> None:
        """Wait until no engine reads a buffer any more; they read in the order of buckets."""
        if buffer in self._busy:
            self._hear_lanes("read")
            self._busy.discard(buffer)

    def _hear_lanes(self, word: str) -> list[Any]:
        """Return what each lane says next."""
        found = []
        for lane in self._all_lanes():
            lane.settimeout(seconds_left(self._until))
            head, handles = receive_message(lane)
            close_descriptors(handles)
            found.append(head.get(word))
        return found

    def _all_lanes(self) -> Iterable[socket.socket]:
        return [lane for lanes in self._lanes.values() for lane in lanes]

    def finish(self) -> str:
        """Send the last bucket; return the root hash once the engines have found the same."""
        for check in self._checks:
            check.check_missing()
        if self._rows:
            self._send_bucket()
        for buffer in range(BUFFERS):
            self._await_read((self._current + buffer) % BUFFERS)
        root_hash = root_of_sums(self._sums)
        for lane in self._all_lanes():
            send_message(lane, {"end": root_hash})
        if any(found != root_hash for found in self._hear_lanes("all")):
            raise PublishFailed("an engine has read other values than were sent")
        return root_hash

    def close(self) -> None:
        """Free all buffers."""
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers = {}


def seconds_left(until: float) -> float:
    """Return the time that a deadline leaves for one message: enough to find one that has come already."""
    return max(0.001, until - time.monotonic())


def check_specs(specs: Iterable[Spec], required: Layout, optional: Layout) -> None:
    """Check tensors that are known before any of them is gathered.

    Raises:
        PublishFailed: One is not what the engine takes, or one is missing.
    """
    check = TensorCheck(required, optional)
    for name, dtype, shape in specs:
        check.note_tensor(name, dtype, shape)
    check.check_missing()
