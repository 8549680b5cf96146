"""Events of a stream as binary frames: `application/octet-stream`, for replay records without base64.

A frame is two lengths of 4 bytes each, little-endian, then so many bytes of JSON, and so many of arrays. The JSON is `{"event": name,
"data": {…}, "bytes": [n, …]}`: the event as in a stream of server-sent events, but that `data` of each record is empty; its bytes are
among the arrays, `routed_experts` before `sampling_mask`, with the lengths that `bytes` has.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any, Final

from pydantic import BaseModel

FRAMES_TYPE: Final = "application/octet-stream"
STREAM_COMMENT: Final = b": ping\n\n"
"""What a silent stream of server-sent events sends, and readers skip; binary frames have none."""
HEADER = struct.Struct("<II")
RECORDS = ("routed_experts", "sampling_mask")
"""Fields that hold records, in the order of their bytes."""
MAX_FRAME_BYTES = 2**28


def encode_frame(event: str, data: BaseModel) -> bytes:
    """Return an event as a frame."""
    fields, arrays = data.model_dump(mode="json"), []
    for record in _records_of(event, fields):
        arrays.append(base64.b64decode(record["data"]))
        record["data"] = ""
    head = {"event": event, "data": fields, "bytes": [len(array) for array in arrays]}
    text = json.dumps(head, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return b"".join([HEADER.pack(len(text), sum(map(len, arrays))), text, *arrays])


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def push_bytes(self, chunk: bytes) -> Iterator[tuple[str, bytes]]:
        """Yield (event, data as JSON) of each frame that the chunk completes, with the records as base64.

        Raises:
            ValueError: What came is not a frame.
        """
        self._pending += chunk
        while len(self._pending) >= HEADER.size:
            text_size, array_size = HEADER.unpack_from(self._pending)
            end = HEADER.size + text_size + array_size
            if end > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {end} bytes")
            if len(self._pending) < end:
                return
            frame = bytes(self._pending[HEADER.size : end])
            del self._pending[:end]
            yield _decode_frame(frame, text_size)


def _decode_frame(frame: bytes, text_size: int) -> tuple[str, bytes]:
    head, at = json.loads(frame[:text_size]), text_size
    try:
        event, fields, sizes = str(head["event"]), head["data"], list(head["bytes"])
        for record, size in zip(_records_of(event, fields), sizes, strict=True):
            record["data"] = base64.b64encode(frame[at : at + size]).decode()
            at += size
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"a frame without its parts: {error}") from error
    if at != len(frame):
        raise ValueError(f"a frame with {len(frame) - at} bytes too many")
    return event, json.dumps(fields).encode()


def _records_of(event: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the records of an event, in the order of their bytes."""
    if event in RECORDS:
        yield fields
    else:
        yield from (fields[name] for name in RECORDS if fields.get(name) is not None)
