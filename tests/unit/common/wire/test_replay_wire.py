"""Replay records on the wire: rows of masks in the shorter of two forms, routes of a shape, and what lies about it."""

from __future__ import annotations

import base64
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_common.wire import RoutedExperts, SamplingMask
from rollout_common.wire.rich_requests import mask_row_bytes
from rollout_worker.engines.sampling.token_draw import pack_mask_row
from rollout_worker.replay_records import (
    PIECE_BYTES,
    ExpertRoutes,
    TokenMasks,
    base64_pieces,
)


@given(st.integers(1, 600), st.integers(1, 5), st.integers(0, 1 << 32))
def test_rows_of_any_kind_come_back(vocab: int, rows: int, seed: int) -> None:
    chance = random.Random(seed)
    masks, wanted = TokenMasks(vocab), []
    for _ in range(rows):
        count = chance.randint(1, vocab)
        ids = chance.sample(range(vocab), count)
        allowed = torch.zeros(vocab, dtype=torch.bool)
        allowed[ids] = True
        found, row = pack_mask_row(allowed)
        assert (found, len(row)) == (count, mask_row_bytes(count, vocab))
        masks.append_row(found, row)
        wanted.append(sorted(ids))
    sent = SamplingMask.model_validate_json(masks.to_wire(0, len(wanted)).model_dump_json())
    assert [ids.tolist() for ids in sent.allowed_ids()] == wanted
    begin = chance.randint(0, len(wanted))
    assert [ids.tolist() for ids in masks.to_wire(begin, len(wanted)).allowed_ids()] == wanted[
        begin:
    ]


def test_all_tokens_take_no_byte() -> None:
    assert pack_mask_row(torch.ones(152_064, dtype=torch.bool)) == (152_064, b"")
    few = torch.zeros(152_064, dtype=torch.bool)
    few[:9] = True
    assert len(pack_mask_row(few)[1]) == 36


@pytest.mark.parametrize("kind", ["uint8", "uint16"])
def test_routes_are_numbers_of_their_type(kind: str) -> None:
    numbers = np.arange(5 * 3 * 2, dtype=kind).reshape(5, 3, 2) * (1 if kind == "uint8" else 300)
    routes = ExpertRoutes(4, 3, 2, kind, bytearray(numbers.tobytes()))  # type: ignore[arg-type]
    assert (len(routes), routes.end) == (5, 9)
    sent = RoutedExperts.model_validate_json(routes.to_wire(6, 9).model_dump_json())
    assert (sent.start, sent.rows) == (6, 3)
    assert (sent.to_array() == numbers[2:]).all()


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        (RoutedExperts(start=0, rows=2, layers=1, top_k=2, dtype="uint8", data="AAAA"), "3 bytes"),
        (
            RoutedExperts(start=0, rows=1, layers=1, top_k=1, dtype="uint8", data="%%"),
            "base64|Only",
        ),
        (SamplingMask(vocab_size=100, counts=(1, 2), data="AAAA"), "3 bytes"),
    ],
    ids=["short", "no base64", "short masks"],
)
def test_what_does_not_fit_its_shape_is_an_error(
    record: RoutedExperts | SamplingMask, wrong: str
) -> None:
    with pytest.raises(ValueError, match=wrong):
        record.to_bytes() if isinstance(record, RoutedExperts) else record.to_rows()


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 5])
def test_pieces_of_base64_are_the_whole(size: int) -> None:
    data = bytes(index % 251 for index in range(size))
    assert b"".join(base64_pieces(data)) == base64.b64encode(data)
