"""`rollout-operator run`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

import prometheus_client

from rollout_common import tracing

from . import operator_logs
from .config import ConfigError, OperatorConfig, parse_config
from .operator_process import Operator
from .passes.reconcile import Reconciler


def main() -> None:
    """Run the operator; exit code 0: stopped, 1: Lease lost or task died, 2: wrong setting."""
    try:
        config = parse_config(sys.argv[1:])
        operator_logs.configure_logging(config.log_level, config.log_format)
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        tracing.start_tracing("rollout-operator")
        code = asyncio.run(_run_operator(config))
        tracing.stop_tracing()
        sys.exit(code)
    except (ConfigError, tracing.TracingUnavailable) as error:
        sys.stderr.write(f"rollout-operator: {error}\n")
        sys.exit(2)


async def _run_operator(config: OperatorConfig) -> int:
    operator = Operator(config, lambda context: Reconciler(context).reconcile)
    operator.handle_signals()
    code = await operator.run()
    if code != 0:
        # A successor may be writing already: don't wait for threads, sockets or garbage.
        logging.shutdown()
        os._exit(code)
    return code


if __name__ == "__main__":
    main()
