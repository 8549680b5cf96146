"""What a process of an engine reads of a trainer's device memory, bucket by bucket, into its own.

The trainer's process on the same device fills a buffer, says which tensors are in it and what their bytes sum up to,
and waits until they were read. This process copies them within the device, sums them up itself, and only then
gives the tensors to the engine's loader. Whether all came is known at the end, and they are loaded into memory without
values: after a failure nothing is left there that could serve.

The lane to that process comes from the worker, whose turn this process shares (`rollout_common.turn.sharing`).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollout_common.transfer.connections.descriptor_messages import (
    close_descriptors,
    dial_messages,
    receive_message,
    send_message,
)
from rollout_common.transfer.connections.frames import Malformed, TransferError
from rollout_common.transfer.memory.exported_memory import ExportedMemory, device_identity
from rollout_common.transfer.tensor_sums import root_of_sums, sum_tensors
from rollout_worker.engine import TensorEntry, TensorSpec, WeightsLayout
from rollout_worker.engines.settings import LANE_SECONDS, LENT_SILENCE_SECONDS
from rollout_worker.weights import check_layout, check_tied_weights

from .tensor_views import TORCH_DTYPES, view_tensors


def read_lent(
    ticket: Mapping[str, Any], device: torch.device, skip: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a trainer lends to this process, on its device; they belong to the caller.

    Tensors that the model ties to others are summed up, and not yielded.

    Args:
        ticket: As `make_ticket` returned it.
        device: Of this process.
        skip: Beginning of the names of tensors that can't be lent; empty: none.

    Raises:
        WeightsRejected: A tensor is unknown, missing, or not what the layout says.
        RuntimeError: What came is not what was sent, or the trainer is gone.
    """
    required, optional = (
        {
            name: TensorSpec(dtype, tuple(shape))
            for name, (dtype, shape) in each.items()
            if not (skip and name.startswith(skip))
        }
        for each in ticket["specs"]
    )
    layout = WeightsLayout(required, optional, ticket["tied"])
    try:
        with _open_lane(str(ticket["lent"]), device) as sock:
            yield from _LentReader(sock, device, layout).read_buckets()
    except TransferError as error:
        raise RuntimeError(f"the trainer does not lend its tensors any more: {error}") from error


def _open_lane(path: str, device: torch.device) -> socket.socket:
    """Return a socket to the trainer's process on this device."""
    with dial_messages(path, LANE_SECONDS) as worker:
        send_message(worker, {"device": device_identity(_device_name(device))})
        answer, handles = receive_message(worker)
    if "error" in answer or not handles:
        close_descriptors(handles)
        raise Malformed(str(answer.get("error", "the worker has sent no lane")))
    close_descriptors(handles[1:])
    sock = socket.socket(fileno=handles[0])
    # Beyond the trainer's own deadline nobody wants the rest, and a worker that stops waits for this read.
    sock.settimeout(min(LENT_SILENCE_SECONDS, float(answer["seconds"])))
    return sock


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


class _LentReader:
    """Reads one version from one lane."""

    def __init__(self, sock: socket.socket, device: torch.device, layout: WeightsLayout) -> None:
        self._sock, self._device, self._layout = sock, device, layout
        self._buffers: dict[int, ExportedMemory] = {}
        self._rows: dict[str, tuple[str, Sequence[int], str]] = {}
        """By name: dtype, shape and sum."""

    def read_buckets(self) -> Iterator[tuple[str, Tensor]]:
        try:
            while True:
                head, handles = receive_message(self._sock)
                if "end" in head:
                    self._finish(str(head["end"]))
                    return
                if "failed" in head:
                    raise Malformed(str(head["failed"]))
                self._open_buffer(head, handles)
                yield from self._read_bucket(head)
        finally:
            for each in self._buffers.values():
                each.close()

    def _open_buffer(self, head: Mapping[str, Any], handles: list[int]) -> None:
        """Map the buffer that came with a bucket, if one did."""
        if not handles:
            return
        close_descriptors(handles[1:])
        former = self._buffers.pop(head["buffer"], None)
        if former is not None:
            former.close()
        self._buffers[head["buffer"]] = ExportedMemory.open(
            _device_name(self._device), int(head["nbytes"]), handles[0]
        )

    def _read_bucket(self, head: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Copy a bucket, let the trainer fill its buffer again, and yield what is in it once it is verified."""
        rows = head["tensors"]
        for name, dtype, *_ in rows:
            if name in self._rows or dtype not in TORCH_DTYPES:
                raise Malformed(f"tensor {name!r} came twice, or with the dtype {dtype}")
        entries = [TensorEntry(row[0], TensorSpec(row[1], tuple(row[2]))) for row in rows]
        self._check_entries(entries)
        whole = self._buffers[head["buffer"]].as_tensor()
        # Each by itself: a loader may keep some of them until it has a layer's.
        places = [tuple(row[:4]) for row in rows]
        tensors = [(name, part.clone()) for name, part in view_tensors(whole, places)]
        del whole
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        send_message(self._sock, {"read": head["buffer"]})
        sums = sum_tensors([tensor for _, tensor in tensors])
        for row, found in zip(rows, sums, strict=True):
            name, dtype, shape, _, said = row
            if found != said:
                raise Malformed(
                    f"tensor {name!r} is damaged: its bytes sum up to {found}, not {said}"
                )
            self._rows[name] = dtype, shape, found
        yield from ((name, tensor) for name, tensor in tensors if name not in self._layout.tied)

    def _check_entries(self, entries: Sequence[TensorEntry]) -> None:
        """Refuse tensors that the model does not have; missing ones may still come."""
        have = {entry.name for entry in entries}
        required = {name: spec for name, spec in self._layout.required.items() if name in have}
        check_layout(
            WeightsLayout(required, self._layout.optional, {}), entries, "what the trainer lends"
        )

    def _finish(self, root_hash: str) -> None:
        """Check that everything came, and tell the trainer what it was."""
        entries = [
            TensorEntry(name, TensorSpec(dtype, tuple(shape)))
            for name, (dtype, shape, _) in self._rows.items()
        ]
        check_layout(self._layout, entries, "what the trainer lends")
        check_tied_weights(self._layout.tied, {name: row[2] for name, row in self._rows.items()})
        found = root_of_sums((name, *row) for name, row in self._rows.items())
        if found != root_hash:
            raise Malformed(f"the tensors sum up to {found}, not {root_hash}")
        send_message(self._sock, {"all": found})
