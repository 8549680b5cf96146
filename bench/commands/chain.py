"""One copy of a version through a chain of receivers whose links are all as fast, against that link's rate.

Each of 8 and 16 receivers is a process with a worker's port for weights and no engine; each of them, and
the trainer, sends no faster than one rate. Publish until the last one has verified every byte.
"""

from __future__ import annotations

import torch

from bench.options import Options
from bench.reporting.figures import Figure, Goal, Result, figure
from bench.rigs.hops import hops

RATE = 12 << 20
"""Bytes a second of each link: sixteen of them are what two cores copy and hash at ease. At twice as much they don't."""
TENSORS, TENSOR_BYTES = 40, 4 << 20
SHARES = {1: None, 8: 0.85, 16: 0.80}
"""Of the link's rate, by how many receivers there are."""


def run(options: Options) -> Result:
    """Measure all lengths in turn; the quick run sends less, and only shows that it works."""
    torch.set_num_threads(1)
    made = torch.Generator().manual_seed(1)
    size = TENSOR_BYTES // (16 if options.quick else 1)
    tensors = {
        f"layer.{index}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=made)
        for index in range(TENSORS)
    }
    took: dict[int, list[float]] = {count: [] for count in SHARES}
    with hops(max(SHARES), RATE) as chain:
        chain.push(tensors, max(SHARES))  # memory is made once
        for _ in range(options.count(5, 2)):
            for count, seconds in took.items():
                seconds.append(chain.push(tensors, count))
    line = TENSORS * size / RATE
    notes = [
        f"{TENSORS} tensors, {TENSORS * size / 1e6:.0f} MB, {RATE / 1e6:.0f} MB/s a link, all on one machine: "
        f"one copy takes {line:.2f} s on a link.",
        "A link is a limit of its sender's rate: a chunk of 1 MiB arrives as soon as it may be sent. A network card would keep it for as"
        f" long as it takes on the wire, which adds {(max(SHARES) - 1) * (1 << 20) / RATE:.2f} s for {max(SHARES)} receivers.",
    ]
    return Result("chain", "Chains of receivers", [_figure(took, n, line) for n in SHARES], notes)


def _figure(took: dict[int, list[float]], count: int, line: float) -> Figure:
    share = SHARES[count]
    return figure(
        f"{count} receiver{'s' if count > 1 else ''}: until the last one has verified it",
        took[count],
        baseline=line,
        against="one copy at the link's rate",
        goal=None if share is None else Goal(line / share),
    )
