"""A trainer that publishes what it is told to: real memory, real connections, killed at any moment.

    push_trainer SOCKET DATA,… CONTROL,… FOLDER…

It takes the pool, says which epoch it has, and then publishes a version for each order `{"version", "folder",
"transport"}` that comes over the socket. Each answer is one line of JSON. With `"hold": seconds` a call in C first keeps
the interpreter's lock for so long; with `"slow": seconds` the tensors come as a stream that takes them, and with
`"breaks": true` it fails halfway.
"""

from __future__ import annotations

import ctypes
import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from safetensors.torch import load_file

from rollout_client import DirectOptions, PublishFailed, RolloutError, RolloutPool


def given(order: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    """The tensors, as the order wants them."""
    return (
        stream(tensors, order["slow"], order.get("breaks", False)) if "slow" in order else tensors
    )


def stream(tensors: Mapping[str, Any], seconds: float, breaks: bool) -> Iterator[tuple[str, Any]]:
    for number, item in enumerate(tensors.items()):
        if breaks and number > len(tensors) // 2:
            raise PublishFailed("the trainer's own error")
        yield item
        time.sleep(seconds / len(tensors))


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
                if "hold" in order:
                    ctypes.PyDLL(None).usleep(int(order["hold"] * 1e6))
                    time.sleep(1)  # what waited for the lock finds out what has happened
                try:
                    done = pool.publish_weights(
                        order["version"], tensors=given(order, tensors[order["folder"]]),
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
