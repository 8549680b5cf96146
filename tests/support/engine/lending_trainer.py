"""A trainer that lends a folder's tensors in its turn, and may be killed before any of its messages.

    lending_trainer.py DIRECTORY DEVICES FOLDER EPOCH VERSION KILL_AT

It writes the root hash to stdout. KILL_AT 0: it lives.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from rollout_client.turn import bucket_stream, lending, local_turn


def count_messages(kill_at: int, modules: Sequence[ModuleType], names: Sequence[str]) -> None:
    """Kill this process before its call of this number of these functions."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args)

        return counting

    for module in modules:
        for name in names:
            setattr(module, name, counted(getattr(module, name)))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def main(arguments: Sequence[str]) -> int:
    directory, devices, folder, epoch, version, kill_at = arguments
    count_messages(int(kill_at), (lending, bucket_stream), ("send_message", "receive_message"))
    tensors = read_tensors(Path(folder))
    with local_turn(devices.split(","), directory, seconds=30) as turn:
        done = turn.hand_over(
            int(version), tensors.items(), epoch=int(epoch), seconds=60, bucket_bytes=1 << 20
        )
        sys.stdout.write(done.root_hash)
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
