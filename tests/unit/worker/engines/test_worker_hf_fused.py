"""Tensors that transformers makes of several of the checkpoint's: where each of these lies in them."""

from __future__ import annotations

import pytest
import torch

from rollout_worker.engines.hf.weights.loading import FusedPart, fuse_tensors
from rollout_worker.engines.hf.weights.loading import _locate_part as part_in


@pytest.mark.parametrize(
    ("rows", "columns", "turned"),
    [
        (slice(None), slice(None), False),
        (slice(2, 4), slice(None), False),
        (slice(None), slice(1, 3), False),
        (slice(1, 3), slice(None), True),
        (slice(3, 4), slice(2, 3), False),
    ],
)
def test_a_part_is_found_and_written_where_it_lies(
    rows: slice, columns: slice, turned: bool
) -> None:
    home = torch.zeros(4, 3)
    numbers = torch.arange(100, 112).view(4, 3)
    where = numbers[rows, columns]
    part = part_in((where.t() if turned else where).contiguous(), home, 100)
    assert part is not None
    tensor = torch.rand(part.shape)
    [(target, made)] = fuse_tensors({"x": part}, {"x": tensor})
    assert target is home
    assert torch.equal(made[rows, columns], tensor.t() if turned else tensor)


@pytest.mark.parametrize(
    "where",
    [
        torch.tensor([100, 102, 101]),
        torch.tensor([103, 102, 101]),
        torch.tensor([110, 111, 112]),
        torch.tensor([99, 100, 101]),
        torch.empty(0, dtype=torch.int64),
    ],
    ids=["not in order", "backwards", "beyond its end", "before it", "nothing"],
)
def test_what_does_not_lie_in_it_in_order_is_no_part(where: torch.Tensor) -> None:
    assert part_in(where, torch.zeros(4, 3), 100) is None


def test_looking_for_a_part_costs_what_the_part_has_and_not_its_home() -> None:
    home = torch.empty(2**40, device="meta")  # numbers of all of it would take 8 TiB
    part = part_in(torch.arange(2**39, 2**39 + 6).view(2, 3), home, 0)
    assert part is not None
    assert (part.strides, part.offset) == ((3, 1), 2**39)


def test_a_home_is_made_of_all_its_parts_whatever_became_of_its_memory() -> None:
    home = torch.zeros(2, 2)
    parts = {
        name: FusedPart(home, home.shape, torch.Size([2]), (1,), 2 * index)
        for index, name in enumerate("ab")
    }
    home.data = torch.empty(0)  # asleep
    [(target, made)] = fuse_tensors(
        parts, {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}
    )
    assert target is home
    assert made.tolist() == [[1.0, 2.0], [3.0, 4.0]]
