"""Entry point for `kopf run operator/handlers.py` or `kopf run -m rollout_operator.handlers`.

Here kopf streams and handles signals; the rest runs next to it, configured by the environment.
Nothing may import this module (see docs/architecture.md). It may be loaded as a script, so its
imports are absolute.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

import kopf

from rollout_common import tracing
from rollout_operator import config, operator_logs
from rollout_operator.cache import kopf_streams
from rollout_operator.operator_process import Operator
from rollout_operator.passes.reconcile import Reconciler


class _OperatorProcess:
    """The one operator of this process, between startup and cleanup."""

    operator: Operator | None = None
    task: asyncio.Task[int] | None = None


def _feed_operator(event: str | None, obj: Mapping[str, Any]) -> None:
    if _OperatorProcess.operator is not None:
        _OperatorProcess.operator.take_pool_event(event, obj)


def _exit_on_failure(task: asyncio.Task[int]) -> None:
    if task.cancelled() or task.exception() is not None or task.result() != 0:
        logging.shutdown()
        os._exit(1)  # the Lease is lost or a task died: kopf must not run on without us


@kopf.on.startup()
async def startup(settings: kopf.OperatorSettings, **_: Any) -> None:
    """Start everything but the stream."""
    kopf_streams.configure_kopf(settings, embedded=False)
    try:
        chosen = config.parse_config(["run"])
    except config.ConfigError as error:
        raise kopf.PermanentError(str(error)) from error
    operator_logs.configure_logging(chosen.log_level, chosen.log_format)
    try:
        tracing.start_tracing("rollout-operator")
    except tracing.TracingUnavailable as error:
        raise kopf.PermanentError(str(error)) from error
    operator = Operator(chosen, lambda context: Reconciler(context).reconcile, embedded=False)
    _OperatorProcess.operator = operator
    _OperatorProcess.task = asyncio.create_task(operator.run(), name="rollout operator")
    _OperatorProcess.task.add_done_callback(_exit_on_failure)


@kopf.on.cleanup()
async def cleanup(**_: Any) -> None:
    """Finish passes and give the Lease back."""
    if _OperatorProcess.operator is not None and _OperatorProcess.task is not None:
        _OperatorProcess.operator.stop()
        await asyncio.wait({_OperatorProcess.task}, timeout=20)
        await asyncio.to_thread(tracing.stop_tracing)


kopf_streams.register_handlers(_feed_operator)
