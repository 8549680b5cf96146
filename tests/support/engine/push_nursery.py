"""Workers and trainers as processes of their own that start at once: torch is imported before they are forked.

    python push_nursery.py

Takes a line of JSON from stdin for each child, `{"role": …, "arguments": […], "out": file, "lease": seconds or null}`, and writes one when it
has been started (`{"started": pid}`) and when it has ended (`{"ended": pid, "status": …}`). It goes with its stdin,
and its children with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import safetensors.torch  # noqa: F401
import torch  # noqa: F401
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import rollout_worker.engines.hf
import rollout_worker.ports.server
import rollout_worker.service  # noqa: F401
from rollout_client.steering.pushing import sending
from rollout_common.parent_death import die_with_parent
from rollout_common.transfer.connections import blocking_connection as connection
from rollout_common.transfer.connections import frame_stream
from rollout_worker.__main__ import main as serve
from rollout_worker.ports import weights_port
from tests.support.engine import lending_trainer, lending_worker, push_trainer

ROLES: dict[str, Callable[[Sequence[str]], int]] = {
    "worker": lambda arguments: serve(["serve", *arguments]),
    "trainer": push_trainer.main,
    "lender": lending_trainer.main,
    "borrower": lending_worker.main,
}


def shorten(seconds: float) -> None:
    """Have trainer and worker take a silence of these seconds for the other one's end."""
    for module, name, value in (
        (sending, "LEASE_SECONDS", seconds),
        (weights_port, "LEASE_SECONDS", seconds),
        (connection, "PING_SECONDS", seconds / 20),
        (frame_stream, "PING_SECONDS", seconds / 20),
    ):
        assert hasattr(module, name)
        setattr(module, name, value)


def tell(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def child(order: dict[str, Any]) -> NoReturn:
    """Become what was ordered; never returns to the nursery's loop."""
    status = 1
    try:
        die_with_parent()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        out = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        os.closerange(3, 64)
        if order.get("lease") is not None:
            shorten(order["lease"])
        status = ROLES[order["role"]](order["arguments"])
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)


def reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        tell(ended=pid, status=status)


def main() -> None:
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    tell(ready=True)
    pending = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            reap()
        if 0 not in ready:
            continue
        if not (data := os.read(0, 1 << 16)):
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            if (pid := os.fork()) == 0:
                child(json.loads(line))
            tell(started=pid)


if __name__ == "__main__":
    main()
