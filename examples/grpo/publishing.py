"""Publish the policy after each step, straight into the workers' memory or as files."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rollout_client import RolloutPool

if TYPE_CHECKING:
    from grpo import Identity, Policy
    from rollout_client.turn import HeldTurn

KEPT_FOLDERS = 3
Way = Literal["files", "auto", "shm", "tcp", "nixl"]


class Publisher:
    """Publishes one version after another to the pool, in an epoch of its own.

    `way` and `seconds` are those of the version published last: `files`, or `memory (…)` with how the bytes travelled;
    from the call until it serves.

    Args:
        pool: the pool that this becomes the trainer of.
        policy: remembers each version *before* it is published and anyone can sample from it.
        weights: folder for the versions.
        mount: the same folder, as the workers see it.
        transport: `files`, or a transport of `publish_weights`.
    """

    def __init__(
        self,
        pool: RolloutPool,
        policy: Policy,
        weights: Path,
        mount: Path,
        transport: Way = "auto",
    ) -> None:
        self.pool, self.policy = pool, policy
        self.epoch, self.version = pool.acquire(), 0
        self.committed: Identity = (0, 0)
        self.folder, self.mount = weights, mount
        self.transport: Way = transport
        self.way, self.seconds = "", 0.0

    @property
    def identity(self) -> Identity:
        """The newest version that may have been sampled from."""
        return (self.epoch, self.version) if self.version else (0, 0)

    def publish(self, turn: HeldTurn | None = None) -> None:
        """Publish the current policy; return once it is committed.

        Args:
            turn: Lend it to the engines that sleep in this turn; None: send or write it.
        """
        self.version += 1
        self.policy.remember(self.identity)
        began = time.monotonic()
        if turn is not None:
            tensors = self.policy.published()["tensors"]
            handed = turn.hand_over(self.version, tensors, epoch=self.epoch)
            done = self.pool.publish_handed_over(handed)
        elif self.transport == "files":
            # A few more than serve, for workers that restart during the publish.
            done = self.pool.save_and_publish(
                self.policy.model,
                self.version,
                self.folder,
                mounted_at=self.mount,
                keep=KEPT_FOLDERS,
            )
        else:
            done = self.pool.publish_weights(
                self.version, transport=self.transport, **self.policy.published()
            )
        self.seconds = time.monotonic() - began
        self.way = "files" if turn is None else "lent"
        if done.report is not None:
            kinds = sorted({each.transport for each in done.report.replicas.values()})
            self.way = f"memory ({'+'.join(kinds)})"
        self.committed = self.identity


def with_transport(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add what says how weights get to the workers."""
    parser.add_argument(
        "--transport",
        choices=("auto", "shm", "tcp", "nixl", "files"),
        default="auto",
        help="how weights are published: straight into the workers' memory (over shared memory, TCP"
        " or NIXL), or as files of the shared volume",
    )
    return parser
