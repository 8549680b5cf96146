"""A trainer that publishes what it is told to: real memory, real connections, killed at any moment.

    push_trainer SOCKET DATA,… CONTROL,… FOLDER…

It takes the pool, says which epoch it has, and then publishes a version for each order `{"version", "folder",
"transport"}` that comes over the socket. Each answer is one line of JSON.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

from safetensors.torch import load_file

from rollout_client import DirectOptions, RolloutError, RolloutPool


def main(arguments: Sequence[str]) -> int:
    where, data, control, *folders = arguments
    with socket.socket(socket.AF_UNIX) as orders:
        orders.connect(where)
        lines = orders.makefile("rw")

        def say(**fields: Any) -> None:
            lines.write(json.dumps(fields) + "\n")
            lines.flush()

        tensors = [load_file(f"{folder}/model.safetensors") for folder in folders]
        direct = DirectOptions(in_flight="Abort")
        with RolloutPool.from_urls(
            data.split(","), control_urls=control.split(","), direct=direct
        ) as pool:
            say(epoch=pool.acquire())
            for line in lines:
                order = json.loads(line)
                try:
                    done = pool.publish_weights(
                        order["version"], tensors=tensors[order["folder"]],
                        transport=order["transport"], seconds=60,
                    )  # fmt: skip
                except RolloutError as error:
                    say(failed=f"{type(error).__name__}: {error}")
                else:
                    assert done.report is not None
                    say(
                        replicas=done.replicas,
                        seconds=done.seconds,
                        phases=dict(done.report.seconds),
                    )
    return 0
