"""Binary frames: whatever the cuts, events come back; what is no frame is an error."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_common.wire import RoutedExperts, SamplingMask, StreamDelta, Wire
from rollout_common.wire.event_frames import HEADER, FrameReader, encode_frame


def event(kind: int, data: bytes) -> tuple[str, Wire]:
    text = base64.b64encode(data).decode()
    routes = RoutedExperts(start=0, rows=len(data), layers=1, top_k=1, dtype="uint8", data=text)
    masks = SamplingMask(vocab_size=7, counts=(7,) * len(data), data="")
    if kind == 0:
        return "routed_experts", routes
    return "delta", StreamDelta(
        index=0,
        token_ids=tuple(data),
        routed_experts=routes if kind > 1 else None,
        sampling_mask=masks if kind > 2 else None,
        weights=(),
    )


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=30)), max_size=6),
    st.integers(1, 90),
)
def test_events_come_back_however_they_are_cut(given: list[tuple[int, bytes]], step: int) -> None:
    sent = [event(*each) for each in given]
    stream = b"".join(encode_frame(*each) for each in sent)
    reader, found = FrameReader(), []
    for at in range(0, len(stream), step):
        for name, data in reader.push_bytes(stream[at : at + step]):
            found.append(
                (
                    name,
                    (
                        RoutedExperts if name == "routed_experts" else StreamDelta
                    ).model_validate_json(data),
                )
            )
    assert found == sent


def frame(head: object, arrays: bytes = b"") -> bytes:
    text = json.dumps(head).encode()
    return HEADER.pack(len(text), len(arrays)) + text + arrays


@pytest.mark.parametrize(
    "stream",
    [
        frame({"event": "delta", "data": {}}),
        frame({"event": "delta", "data": {}, "bytes": [3]}, b"abc"),
        frame({"event": "delta", "data": {}, "bytes": []}, b"abc"),
        frame({"event": "routed_experts", "data": {}, "bytes": []}),
        frame([]),
        frame({"event": "delta", "data": [], "bytes": []}),
        HEADER.pack(2**31, 2**31),
        HEADER.pack(3, 0) + b"{{{",
    ],
    ids=["no lengths", "no record", "too many bytes", "too few", "list", "data", "huge", "no JSON"],
)
def test_what_is_no_frame_is_an_error(stream: bytes) -> None:
    with pytest.raises(ValueError, match=r"frame|Expecting|zip"):
        list(FrameReader().push_bytes(stream))
