"""A version fetched by a replica that joins, from the members that have it, against one plain copy over loopback.

Members and joiner are processes with a worker's port for weights and no engine, and have no limit to what
they send. The joiner takes fresh memory, as a replica that has just started does, and so does the plain
copy: private memory, as for the hf engine, and once shared memory, as for vLLM and SGLang, whose processes map
it. The clock runs in the joiner, from before it calls the first member until every byte is verified.
"""

from __future__ import annotations

from statistics import median

import torch

from bench.options import Options
from bench.reporting.figures import Figure, Goal, Result, figure
from bench.rigs.hops import hops
from bench.rigs.pushing import over_loopback

TENSORS, TENSOR_BYTES = 250, 4 << 20
MEMBERS = (1, 2, 3)
ASKED = (2, 3)
"""Members that a joiner is sent to, as a rule; with one the pool has lost most of its copies."""
MOST = 1.25
"""Times a plain copy."""


def run(options: Options) -> Result:
    """Measure all ways in turn; the quick run fetches less, and only shows that it works."""
    torch.set_num_threads(1)
    size = TENSOR_BYTES // (16 if options.quick else 1)
    whole = torch.randint(
        0, 256, (TENSORS, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    tensors = {f"layer.{index}": whole[index] for index in range(TENSORS)}
    plain, bare, cpu, shared = list[float](), list[float](), list[float](), list[float]()
    took: dict[int, list[float]] = {count: [] for count in MEMBERS}
    with hops(max(MEMBERS) + 1) as members:
        members.push(tensors, max(MEMBERS))
        content = memoryview(whole.numpy().data).cast("B")
        for number in range(1 + options.count(10, 2)):
            samples = {count: members.join(count) for count in MEMBERS}
            copied, one = over_loopback(content), members.copy()
            mapped, _ = members.join(max(MEMBERS), shared=True)
            if number:  # in the first round members hash what they will not hash again
                plain.append(copied)
                bare.append(one)
                shared.append(mapped)
                for count, (seconds, of_cpu) in samples.items():
                    took[count].append(seconds)
                    cpu.append(of_cpu)
    notes = [
        f"{TENSORS} tensors, {whole.nbytes / 1e9:.2f} GB; members, joiner and the plain copy share these cores.",
        f"A joiner needs {median(cpu):.2f} s of CPU, whoever gives ({min(cpu):.2f} to {max(cpu):.2f}).",
    ]
    figures = [_figure(took[count], count, plain) for count in MEMBERS]
    figures += [
        figure(
            "… the same", took[max(MEMBERS)], baseline=bare, against="1 member, hashing nothing"
        ),
        figure("1 member, hashing nothing", bare, baseline=plain, against="plain loopback"),
        _shared(shared, plain),
    ]
    return Result("joiner", "A replica that joins", figures, notes)


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
