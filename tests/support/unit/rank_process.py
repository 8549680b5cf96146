"""One rank of a trainer; rank 0 fills a push.

Writes what rank 0 has in shared memory, as JSON of hex by name, and how many tensors came on each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rollout_client import whole_tensors
from rollout_client.steering.pushing.pusher import Pusher


def state() -> dict[str, torch.Tensor]:
    """Return what all ranks have together: sharded evenly, unevenly, by columns, empty, replicated."""
    return {
        "z.even": torch.arange(8.0).reshape(4, 2),
        "a.uneven": torch.arange(15).reshape(5, 3),
        "columns": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
        "short": torch.arange(2, dtype=torch.float32).reshape(1, 2),
        "empty": torch.empty(0, 4),
        "same": torch.arange(3.0),
        "plain": torch.tensor(7),
    }


def sharded() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    found: dict[str, Any] = {}
    for name, tensor in state().items():
        placement = {"columns": Shard(1), "same": Replicate()}.get(name, Shard(0))
        found[name] = tensor if name == "plain" else distribute_tensor(tensor, mesh, [placement])
    return found


def main(rank: int, ranks: int, folder: Path) -> None:
    where = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks)
    tensors = sharded()
    taken = 0
    if rank:
        for _ in range(2):
            taken += sum(1 for _ in whole_tensors(tensors))
    else:
        pusher = Pusher()
        push = pusher.begin(tensors)
        push.fill_here()
        filling = push.filling
        content = {t.name: bytes(filling.slot.view_tensor(t)).hex() for t in filling.layout.tensors}
        push.close()
        taken = len(content)

        def failing() -> Iterator[tuple[str, Any]]:
            nonlocal taken
            for name, tensor in tensors.items():
                yield name, tensor if name != "columns" else tensor.full_tensor().to_sparse()
                taken += 1

        push = pusher.begin(failing())
        try:
            push.fill_here()
        except ValueError as error:
            (folder / "error").write_text(str(error))
        push.close()
        pusher.close()
        (folder / "content").write_text(json.dumps(content))
    (folder / f"taken-{rank}").write_text(str(taken))
    distributed.barrier()
    distributed.destroy_process_group()
