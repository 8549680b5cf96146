"""What differs from the version before: piece by piece, looked for once, and no more once that version is let go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from rollout_client.steering.pushing.push_deltas import PieceDeltas, PreviousVersion
from rollout_client.steering.pushing.stream_filling import Filling
from rollout_client.steering.pushing.tensor_copying import Copier
from rollout_common.transfer.delta import apply_delta
from rollout_common.transfer.memory.arena import Arena
from rollout_worker.schemas import WeightsId

MEBI = 1 << 20
SIZE = 2 * MEBI + 100
"""Of the first tensor: three leaves; the second tensor shares the piece of the last one."""


@dataclass
class Versions:
    """Two versions, one after the other."""

    arena: Arena
    first: Filling
    second: Filling
    before: PreviousVersion
    deltas: PieceDeltas

    def run(self, filling: Filling, piece: int) -> bytes:
        return bytes(filling.slot.view_bytes(*filling.held.pieces.span(piece)))


def tensors() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    bulk = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=made)
    return {"a": bulk, "b": torch.arange(9.0)}


def fill(filling: Filling, values: dict[str, torch.Tensor]) -> None:
    filling.plan((("a", "U8", (SIZE,)), ("b", "F32", (9,))))
    for name, value in values.items():
        filling.take(name, value)
    filling.end()


@pytest.fixture
def versions() -> Iterator[Versions]:
    """In the second one, one byte of the first piece differs, and all of the second piece does."""
    arena = Arena()
    first, second = (Filling(arena, None, Copier()) for _ in range(2))
    values = tensors()
    fill(first, values)
    values["a"] = values["a"].clone()
    values["a"][17] += 1
    values["a"][MEBI : 2 * MEBI] += 1
    fill(second, values)
    before = PreviousVersion.from_filling(
        first, WeightsId(epoch=3, version=4), str(first.root_hash)
    )
    assert before is not None
    yield Versions(arena, first, second, before, PieceDeltas(before, second.held))
    before.close()
    for each in (first, second, arena):
        each.close()


def test_a_piece_is_what_differs_where_that_is_little_and_its_bytes_elsewhere(
    versions: Versions,
) -> None:
    deltas, found = versions.deltas, [versions.deltas.find_delta(piece) for piece in range(3)]
    root = versions.first.root_hash
    assert deltas.base == {"epoch": 3, "version": 4, "root_hash": root}, "as workers call it"
    assert found[1] is None, "it differs everywhere"
    assert deltas.has_deltas
    for piece in (0, 2):
        delta, content = found[piece], bytearray(versions.run(versions.first, piece))
        assert delta is not None
        assert len(delta) < 100
        apply_delta(delta, memoryview(content))
        assert content == versions.run(versions.second, piece)


def test_it_is_looked_for_once_and_only_where_it_is_asked_for(versions: Versions) -> None:
    deltas, (begin, end) = versions.deltas, versions.second.held.pieces.span(0)
    assert not deltas.has_deltas
    found = deltas.find_delta(0)
    with versions.second.slot.view_bytes(begin, end) as memory:
        memory[:] = bytes(end - begin)
    assert deltas.find_delta(0) is found


@pytest.mark.parametrize("gone", ["the version before", "the pool"])
def test_what_was_not_found_before_that_is_gone_goes_as_its_bytes(
    versions: Versions, gone: str
) -> None:
    found = versions.deltas.find_delta(2)
    if gone == "the pool":
        versions.arena.close()
    else:
        versions.before.close()
    assert versions.deltas.find_delta(0) is None
    assert versions.deltas.find_delta(2) is found


def test_the_version_before_keeps_its_memory_until_it_is_let_go(versions: Versions) -> None:
    versions.first.close()
    assert versions.first.slot.is_lent
    versions.before.close()
    versions.before.close()
    assert not versions.first.slot.is_lent


def test_a_version_whose_pool_was_closed_is_no_base(versions: Versions) -> None:
    versions.first.close()
    versions.before.close()
    slot = versions.first.slot
    versions.arena.close()
    assert PreviousVersion.from_filling(versions.first, WeightsId(epoch=3, version=5), "r") is None
    assert not slot.is_lent
