"""A version fetched by a replica that joins, from the members that have it, against one plain copy over loopback.

Members and joiner are processes with a worker's port for weights and no engine, and have no limit to what
they send. The joiner takes fresh memory, as a replica that has just started does, and so does the plain
copy: private memory, as for the hf engine, and shared memory, as for vLLM and SGLang, whose processes map
it. The clock runs in the joiner, from before it calls the first member until every byte is verified.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import torch

from bench.options import Options
from bench.reporting.figures import Figure, Goal, Result, figure
from bench.rigs.hops import Hops, hops
from bench.rigs.pushing import over_loopback

TENSORS, TENSOR_BYTES = 250, 4 << 20
MEMBERS = (1, 2, 3)
ASKED = (2, 3)
"""Members that a joiner is sent to, as a rule; with one the pool has lost most of its copies."""
MOST = 1.25
"""Times a plain copy."""


@dataclass(slots=True)
class Took:
    """The rounds of each way, in seconds.

    Attributes:
        plain: One plain copy over loopback, to private memory.
        plain_shared: The same to shared memory.
        bare: One member that sends to one that hashes nothing.
        by_members: Of a joiner, by how many give to it; private memory.
        shared: The same to shared memory, from all.
        cpu: Of the joiner.
    """

    plain: list[float] = field(default_factory=list)
    plain_shared: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    by_members: dict[int, list[float]] = field(
        default_factory=lambda: {count: [] for count in MEMBERS}
    )
    shared: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def measure(self, members: Hops, content: memoryview) -> None:
        """Go through all ways once."""
        for count, took in self.by_members.items():
            seconds, cpu = members.join(count)
            took.append(seconds)
            self.cpu.append(cpu)
        self.plain.append(over_loopback(content))
        self.bare.append(members.copy())
        self.shared.append(members.join(max(MEMBERS), shared=True)[0])
        self.plain_shared.append(over_loopback(content, shared=True))


def run(options: Options) -> Result:
    """Measure all ways in turn; the quick run fetches less, and only shows that it works."""
    torch.set_num_threads(1)
    size = TENSOR_BYTES // (16 if options.quick else 1)
    whole = torch.randint(
        0, 256, (TENSORS, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    tensors = {f"layer.{index}": whole[index] for index in range(TENSORS)}
    took = Took()
    with hops(max(MEMBERS) + 1) as members:
        members.push(tensors, max(MEMBERS))
        content = memoryview(whole.numpy().data).cast("B")
        took.measure(members, content)  # in which members hash what they will not hash again
        took = Took()
        for _ in range(options.count(10, 2)):
            took.measure(members, content)
    cpu = took.cpu
    notes = [
        f"{TENSORS} tensors, {whole.nbytes / 1e9:.2f} GB; members, joiner and the plain copy share these cores.",
        f"A joiner needs {median(cpu):.2f} s of CPU, whoever gives ({min(cpu):.2f} to {max(cpu):.2f}).",
    ]
    return Result("joiner", "A replica that joins", _figures(took), notes)


def _figures(took: Took) -> list[Figure]:
    plain, bare, shared = took.plain, took.bare, took.shared
    return [
        *[_figure(took.by_members[count], count, plain) for count in MEMBERS],
        figure(
            "… the same",
            took.by_members[max(MEMBERS)],
            baseline=bare,
            against="1 member, hashing nothing",
        ),
        figure("1 member, hashing nothing", bare, baseline=plain, against="plain loopback"),
        _shared(shared, plain),
        figure(
            "… the same",
            shared,
            baseline=took.plain_shared,
            against="plain loopback to such memory",
        ),
    ]


def _figure(took: list[float], count: int, plain: list[float]) -> Figure:
    return figure(
        f"{count} member{'s' if count > 1 else ''}: until staged and verified",
        took,
        baseline=plain,
        against="plain loopback",
        goal=Goal(MOST * median(plain)) if count in ASKED else None,
    )


def _shared(took: list[float], plain: list[float]) -> Figure:
    return figure(
        f"{max(MEMBERS)} members, to memory that an engine's processes map",
        took,
        baseline=plain,
        against="plain loopback",
        goal=Goal(MOST * median(plain)),
    )
