"""Publish the policy after each step, and report at the end how long that took, from memory and through files."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

from rollout_client import Published, PublishProgress, RolloutPool

if TYPE_CHECKING:
    from grpo import Identity, Policy

KEPT_FOLDERS = 3
BY_FILES_EVERY = 4
Way = Literal["files", "auto", "shm", "tcp", "nixl"]
PHASES = ("plan", "copy", "transfer", "stage", "commit")


@dataclass(frozen=True)
class Update:
    """One version on its way.

    way: `files`, or `memory (…)` with how the bytes travelled. seconds: from the call until it serves.
    phases: the same by phase, one after the other; a phase that this way has not is missing.
    """

    way: str
    seconds: float
    phases: dict[str, float]


@dataclass
class Clock:
    """Tells the phases of a version that is published as files, by the pool's own progress.

    `copy`: until the pool is told, so the time to write the files and flush them to the disk.
    """

    began: float = field(default_factory=time.monotonic)
    marks: dict[str, float] = field(default_factory=dict)

    def saw(self, progress: PublishProgress) -> None:
        """Note when each phase was first heard of."""
        self.marks.setdefault(progress.phase, time.monotonic())

    def phases(self, end: float) -> dict[str, float]:
        """Return the seconds of each phase. One that was too short to be seen has none."""
        complete = self.marks.get("Complete", end)
        committing = self.marks.get("Committing", complete)
        staging = self.marks.get("Staging", committing)
        moments = {"copy": staging, "stage": committing, "commit": end}
        found, last = dict[str, float](), self.began
        for phase, at in moments.items():
            found[phase], last = at - last, at
        return found


class Publisher:
    """Publishes one version after another to the pool, in an epoch of its own.

    Args:
        pool: the pool that this becomes the trainer of.
        policy: remembers each version *before* it is published and anyone can sample from it.
        weights: folder for the versions.
        mount: the same folder, as the workers see it.
        ways: how versions are published, in turn: `files`, or a transport of `publish_weights`.
    """

    def __init__(
        self,
        pool: RolloutPool,
        policy: Policy,
        weights: Path,
        mount: Path,
        ways: Sequence[Way] = ("auto",),
    ) -> None:
        self.pool, self.policy = pool, policy
        self.epoch, self.version = pool.acquire(), 0
        self.committed: Identity = (0, 0)
        self.folder, self.mount = weights, mount
        self.ways = tuple(ways)
        self.updates: list[Update] = []

    @property
    def identity(self) -> Identity:
        """The newest version that may have been sampled from."""
        return (self.epoch, self.version) if self.version else (0, 0)

    def publish(self) -> None:
        """Publish the current policy; return once it is committed."""
        self.version += 1
        self.policy.remember(self.identity)
        way, clock = self.ways[self.version % len(self.ways)], Clock()
        version = self.version
        if way == "files":
            # A few more than serve, for workers that restart during the publish.
            done = self.pool.save_and_publish(
                self.policy.model, version, self.folder, mounted_at=self.mount, keep=KEPT_FOLDERS,
                progress=clock.saw,
            )  # fmt: skip
        else:
            done = self.pool.publish_weights(version, transport=way, **self.policy.published())
        self.updates.append(update(done, clock))
        self.committed = self.identity


def update(done: Published, clock: Clock) -> Update:
    """Return what the report says of a version that serves now."""
    end = time.monotonic()
    report, seconds = done.report, end - clock.began
    if report is None:
        return Update("files", seconds, clock.phases(end))
    kinds = "+".join(sorted({each.transport for each in report.replicas.values()}))
    return Update(f"memory ({kinds})", seconds, dict(report.seconds))


def table(updates: Sequence[Update]) -> str:
    """Return a table with a row for each way, and what it says; the first is the baseline's."""
    ways = sorted({each.way for each in updates}, key=lambda way: (way != "files", way))
    head = ("way", "versions", "whole", *PHASES, "longest")
    rows, whole = list[tuple[str, ...]]([head]), dict[str, float]()
    for way in ways:
        took = [each for each in updates if each.way == way]
        whole[way] = median(each.seconds for each in took)
        phases = (_median([e.phases[p] for e in took if p in e.phases]) for p in PHASES)
        longest = max(each.seconds for each in took)
        rows.append((way, str(len(took)), f"{whole[way]:.3f}", *phases, f"{longest:.3f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    ratios = (
        f"by {way} a version serves in {whole[way] / whole['files']:.2f} of the time by files"
        for way in ways[1:]
        if "files" in whole
    )
    return "\n".join(
        (
            "weights to the workers: median seconds of one version, whole and by phase",
            *lines,
            "copy: tensors into shared memory, or into files on the volume; commit: until all serve it",
            *ratios,
        )
    )


def _median(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.3f}" if seconds else "-"


def with_transport(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what says how weights get to the workers."""
    parser.add_argument(
        "--transport",
        choices=("auto", "shm", "tcp", "nixl", "files"),
        default="auto",
        help="how weights are published: straight into the workers' memory (over shared memory, TCP"
        " or NIXL), or as files of the shared volume",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help=f"publish every {BY_FILES_EVERY}th version as files all the same, to see both side by"
        " side",
    )
    return parser


def ways_of(args: argparse.Namespace) -> tuple[Way, ...]:
    """Return how versions are to be published, in turn."""
    rest = (args.transport,) * (BY_FILES_EVERY - 1)
    return (*rest, "files") if args.compare else (args.transport,)
