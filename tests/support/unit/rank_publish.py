"""One rank of a trainer that publishes, in one of the stories.

Writes what each publish came to, as JSON lines: version, root hash or error, seconds, what was gathered.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from rollout_client import RolloutError, RolloutPool, whole_tensors
from rollout_client.steering import checkpoint_form
from rollout_client.steering.pushing.ranks import rank_group
from rollout_client.steering.pushing.ranks import rank_rendezvous as meeting
from rollout_client.steering.pushing.ranks.rank_follower import RankFollower
from rollout_client.steering.pushing.shards import shard_writing as writing
from rollout_client.steering.pushing.tensor_copying import Copier
from rollout_common.transfer.connections.frames import Frame
from rollout_common.transfer.layout import LayoutError

GATHERED = ("summed",)
"""What no rank has as it is."""
PLACES: dict[str, tuple[Placement, ...]] = {
    "columns": (Shard(1),),
    "hybrid": (Replicate(), Shard(0)),
    "mixed": (Shard(0), Shard(1)),
    "same": (Replicate(),),
    "twice": (Shard(0), Shard(0)),
}
"""How all ranks have a tensor, or a grid of two by two: if not as rows."""
SERVED_PLACES: dict[str, tuple[Placement, ...]] = {
    "bulk": (Shard(0),),
    "bulk short": (Shard(0),),
    "columns": (Shard(1),),
    "tiles": (Shard(0), Shard(1)),
}
AFAR_RATE = float(16 << 20)
"""Most bytes a second of one publish in the story `afar`."""


def state(step: int, ranks: int) -> dict[str, torch.Tensor]:
    """Return what all ranks have together; with two of them nothing has to be gathered."""
    found = {
        "bulk": torch.arange(step, step + 3 * (1 << 20), dtype=torch.int32).reshape(-1, 1024),
        "empty": torch.empty(0, 4),
        "even": torch.arange(16.0).reshape(8, 2) * step,
        "last only": torch.arange(5.0) - step,
        "plain": torch.tensor(step),
        "same": torch.arange(3.0) + step,
        "short": torch.arange(2, dtype=torch.float32).reshape(1, 2) + step,
        "uneven": torch.arange(15).reshape(5, 3) + step,
    }
    if ranks == 4:
        found["hybrid"] = torch.arange(10.0).reshape(5, 2) + step
        found["twice"] = torch.arange(14.0).reshape(7, 2) + step
        found["columns"] = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4) + step
        found["summed"] = torch.arange(4.0) * ranks
        found["mixed"] = torch.arange(24.0).reshape(4, 6) + step
    return found


def served_state(step: int) -> dict[str, torch.Tensor]:
    """Return what all ranks have together of a version that the tiny engine serves.

    `bulk` is cut by rows, `tiles` so that each node has rows, `columns` so that no node has whole rows.
    """
    numbers = torch.arange(5 * (1 << 20), dtype=torch.int32)
    numbers[:: 1 << 18] += step
    return {
        "bulk": numbers.view(-1, 1024),
        "bulk short": torch.arange(6, dtype=torch.int32).reshape(3, 2) + step,
        "columns": numbers[: 1 << 19].view(-1, 512),
        "number": torch.tensor([step], dtype=torch.uint8),
        "rest": torch.tensor([0], dtype=torch.uint8),
        "tiles": numbers[: 3 << 20].view(-1, 1024),
    }


class Rank:
    """One rank, with a way to break it."""

    def __init__(self, rank: int, ranks: int, folder: Path, url: str, control: str) -> None:
        self.rank, self.ranks, self.folder = rank, ranks, folder
        self._places = url, control
        self.pool = self.another()
        self.mesh = init_device_mesh("cpu", (ranks,))
        self.grid = init_device_mesh("cpu", (2, 2)) if ranks == 4 else None
        self.gathered: list[str] = []
        self.before_copy: Callable[[str], None] = lambda name: None
        whole, copy = checkpoint_form.whole, Copier.copy
        names: dict[int, str] = {}

        def noted(tensor: Any) -> Any:
            self.gathered.append(names[id(tensor)])
            return whole(tensor)

        def copied(copier: Copier, name: str, *rest: Any, **more: Any) -> None:
            self.before_copy(name)
            copy(copier, name, *rest, **more)

        self.names = names
        setattr(writing, "whole", noted)  # noqa: B010 (writing has it from there)
        setattr(Copier, "copy", copied)  # noqa: B010

    def another(self) -> RolloutPool:
        url, control = self._places
        return RolloutPool.from_urls([url], control_urls=[control])

    def mine(self, step: int, *, wide: bool = False) -> dict[str, Any]:
        """Return this rank's part; `wide`: floating-point numbers with twice the bytes."""
        found: dict[str, Any] = {}
        for name, tensor in state(step, self.ranks).items():
            if name == "plain" or (name == "last only" and self.rank == self.ranks - 1):
                found[name] = tensor
            elif name == "summed":
                local = tensor / self.ranks
                found[name] = DTensor.from_local(local, self.mesh, [Partial()])
            elif name != "last only":
                found[name] = self._cut(tensor, PLACES.get(name, (Shard(0),)))
        if wide:
            found = {name: widened(tensor) for name, tensor in found.items()}
        self.names.clear()
        self.names.update({id(tensor): name for name, tensor in found.items()})
        return found

    def served(self, step: int) -> dict[str, Any]:
        """Return this rank's part of `served_state`."""
        return {
            name: self._cut(tensor, SERVED_PLACES[name]) if name in SERVED_PLACES else tensor
            for name, tensor in served_state(step).items()
        }

    def _cut(self, tensor: torch.Tensor, places: Sequence[Placement]) -> DTensor:
        mesh = self.mesh if len(places) == 1 else self.grid
        assert mesh is not None
        return distribute_tensor(tensor, mesh, places)

    def publish(
        self,
        version: int,
        tensors: Any = None,
        pool: RolloutPool | None = None,
        seconds: float = 60,
        **options: Any,
    ) -> None:
        """Publish, and note what came of it."""
        self.gathered.clear()
        told: dict[str, Any] = {"version": version}
        given = self.mine(version) if tensors is None else tensors
        begin = time.monotonic()
        counted: Any = torch.tensor(version)  # an integer that json does not write
        options = {"ranks": distributed.group.WORLD, **options}
        try:
            done = (pool or self.pool).publish_weights(
                counted, tensors=given, seconds=seconds, **options
            )
            told |= {"root": done.root_hash, "bytes": done.report and done.report.bytes}
            told |= {"sent": done.report and done.report.bytes_sent}
        except (RolloutError, LayoutError) as error:
            told["error"] = f"{type(error).__name__}: {error}"
        self.tell(**told, seconds=time.monotonic() - begin, gathered=self.gathered)

    def tell(self, **told: Any) -> None:
        """Note what came of a publish."""
        with (self.folder / f"told-{self.rank}").open("a") as file:
            file.write(json.dumps(told) + "\n")


def together(rank: Rank) -> None:
    """Publishes, failures of one rank, and the end of one in the middle."""
    node, meeting._node_identity = meeting._node_identity, lambda: str(os.getpid())
    with rank.another() as apart:
        rank.publish(1, pool=apart)
    meeting._node_identity = lambda: f"{node()}/{rank.rank // 2}"
    for version in (2, 3, 4):
        rank.publish(version)
    if rank.rank == 1:
        rank.before_copy = fail_at("even")
    rank.publish(5)
    rank.before_copy = lambda name: None
    if rank.rank == 2:
        bad = {**rank.mine(6), "plain": torch.tensor([1, 2])}
    rank.publish(6, bad if rank.rank == 2 else None)
    without = rank.mine(7)
    if rank.rank == 3:
        del without["even"]
    rank.publish(7, without)
    rank.publish(8)
    rank.publish(9, rank.mine(9, wide=True), cast=True)
    if rank.rank == 3:
        rank.before_copy = die_at("bulk")
    # What is gathered waits for the dead as long as the group does.
    rank.publish(10, {k: v for k, v in rank.mine(10).items() if k not in GATHERED})


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with twice the bytes, if it has floating-point numbers."""
    wide = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
    return tensor.to(wide.get(tensor.dtype, tensor.dtype))


def fail_at(bad: str) -> Callable[[str], None]:
    """Find that a tensor can't be copied."""

    def look(name: str) -> None:
        if name == bad:
            raise LayoutError(f"the tensor {bad!r} has no plain values", tensor=bad)

    return look


def die_at(last: str) -> Callable[[str], None]:
    """Kill this process when it is about to copy that tensor."""

    def look(name: str) -> None:
        if name == last:
            os.kill(os.getpid(), signal.SIGKILL)

    return look


def frozen(rank: Rank) -> None:
    """Rank 1 stands still in the middle, goes on too late, and is met anew; then rank 0 is killed."""
    setattr(rank_group, "ACK_SECONDS", 1.0)  # noqa: B010
    rank.publish(1)

    def stop(name: str) -> None:
        if name == "even":
            rank.before_copy = lambda name: None
            os.kill(os.getpid(), signal.SIGSTOP)

    if rank.rank == 1:
        rank.before_copy = stop
    rank.publish(2, seconds=3 if rank.rank == 0 else 60)
    rank.publish(3)
    if rank.rank == 0:
        rank.before_copy = die_at("bulk")
    rank.publish(4)
    rank.publish(5, {"plain": torch.tensor(5)})


def late(rank: Rank) -> None:
    """Rank 1 is late to stop, then rank 3; the others publish on at once."""
    setattr(rank_group, "ACK_SECONDS", 0.5)  # noqa: B010
    node, end = meeting._node_identity, RankFollower._end_publish
    meeting._node_identity = lambda: f"{node()}/{rank.rank // 2}"

    def end_late(follower: RankFollower, outcome: Frame) -> None:
        if (rank.rank, outcome.head["identity"]["version"]) in ((1, 1), (3, 2)):
            time.sleep(1.6)
        end(follower, outcome)

    setattr(RankFollower, "_end_publish", end_late)  # noqa: B010
    for version in (1, 2, 3):
        rank.publish(version)


def afar(rank: Rank) -> None:
    """Two nodes of two ranks publish to a worker: over TCP, as deltas, by shared memory, to a folder, too, and with a limit."""
    node = meeting._node_identity
    meeting._node_identity = lambda: f"{node()}/{rank.rank // 2}"
    rank.publish(1, rank.served(1), transport="tcp", base="auto")
    rank.publish(2, rank.served(2), transport="tcp", base="auto")
    rank.publish(3, rank.served(3))
    spool = str(rank.folder / "spool")
    rank.publish(4, rank.served(4), transport="tcp", spool=spool, mounted_at=spool)
    rank.publish(5, rank.served(5), transport="tcp", base=None, rate=AFAR_RATE)
    if rank.rank == 3:
        rank.before_copy = die_at("bulk")
    rank.publish(6, rank.served(6), transport="tcp")


def untold(rank: Rank) -> None:
    """No worker tells what is to be cast: nobody waits for a rank that gathers alone."""
    rank.publish(1, cast=True, seconds=5)


def gathered(rank: Rank) -> None:
    """Rank 0 publishes shards alone, so the others take part in the gathers; then one of its whole tensors is odd."""
    shards = {name: each for name, each in rank.mine(1).items() if name != "last only"}

    def odd() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in whole_tensors(shards):
            yield name, tensor.to_sparse() if name == "columns" else tensor

    for version, tensors in ((1, shards), (2, odd())):
        if rank.rank:
            rank.tell(version=version, taken=[name for name, _ in whole_tensors(shards)])
        else:
            rank.publish(version, tensors, ranks=None)


def main(rank: int, ranks: int, folder: Path, story: str, url: str, control: str) -> None:
    where = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    stories = (together, frozen, late, untold, afar, gathered)
    {each.__name__: each for each in stories}[story](Rank(rank, ranks, folder, url, control))
    os._exit(0)  # the group has lost a rank, and would wait for it
