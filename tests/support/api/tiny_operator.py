"""A whole operator process around the smallest real pass: it writes what it sees into the status.

    python tests/support/tiny_operator.py FOLDER [flags of `rollout-operator run`]

The pass makes `status.message` say how many pods the pool has and posts an event. Its port, once
known, is in FOLDER/<pod name>.port, and each pass adds a line to FOLDER/<pod name>.passes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rollout_operator import operator_logs
from rollout_operator.api.names import API_VERSION, KIND, PLURAL
from rollout_operator.api.objects import PoolKey
from rollout_operator.config import OperatorConfig, parse_config
from rollout_operator.operator_process import Operator
from rollout_operator.passes.pass_context import PassContext, ReconcileFunction


def make_pass(context: PassContext, folder: Path) -> ReconcileFunction:
    log = folder / f"{context.config.pod_name}.passes"

    async def reconcile(key: PoolKey) -> float | None:
        pool = context.store.find_pool(key)
        with log.open("a") as file:
            file.write(f"{key} {len(context.store.pool_pods(key))} {pool is not None}\n")
        if pool is None:
            return None
        slow = float(pool["metadata"].get("annotations", {}).get("test/slow", 0))
        await asyncio.sleep(slow)
        message = f"{len(context.store.pool_pods(key))} pods"
        if (pool.get("status") or {}).get("message") == message:
            return None
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"resourceVersion": pool["metadata"]["resourceVersion"]},
            "status": {"message": message},
        }
        answer = await context.kube.patch(
            PLURAL, key.namespace, key.name, body, kind="apply", subresource="status"
        )
        context.store.upsert_written("pools", answer)
        context.recorder.record_event(answer, "Normal", "Counted", message)
        return None

    return reconcile


async def run(config: OperatorConfig, folder: Path) -> int:
    operator = Operator(config, lambda context: make_pass(context, folder))
    operator.handle_signals()
    running = asyncio.create_task(operator.run())
    while not operator.port and not running.done():  # noqa: ASYNC110 - bounded by the test
        await asyncio.sleep(0.01)
    (folder / f"{config.pod_name}.port").write_text(str(operator.port))
    return await running


def main(argv: Sequence[str]) -> None:
    config = parse_config(["run", *argv[1:]])
    operator_logs.configure_logging(config.log_level, config.log_format)
    code = asyncio.run(run(config, Path(argv[0])))
    if code:
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
