"""Command line of the worker: `rollout-worker serve`, `rollout-worker openapi`.

It handles signals before anything else: in a container it is PID 1, for which the kernel drops signals
without a handler, and the kubelet would wait for the whole grace period. So functions import what takes
time to import.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from types import FrameType

    from .settings import WorkerSettings

EXIT_BAD_SETTINGS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    Without `argv` it is that of the process, whose signals are handled from here on.
    """
    if argv is None and sys.argv[1:2] == ["serve"]:
        # Until `ports.server` replaces these: nothing serves yet, so nothing has to end in order.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)
        from rollout_common.parent_death import PARENT_VARIABLE, die_with_parent

        if parent := os.environ.pop(PARENT_VARIABLE, None):
            die_with_parent(int(parent))
    arguments = _parser().parse_args(argv)
    if arguments.command == "openapi":
        return _openapi()
    return _serve(arguments)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(0)


def _parser() -> argparse.ArgumentParser:
    import argparse

    from .settings import add_flags

    parser = argparse.ArgumentParser(
        prog="rollout-worker", description="One inference engine behind a data and a control port."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="load a model and serve it",
        description="Load a model and serve it until SIGTERM. Every flag can be given as the"
        " environment variable in brackets; a flag wins.",
        allow_abbrev=False,
    )
    add_flags(serve)
    commands.add_parser("openapi", help="print the OpenAPI documents of both ports as JSON")
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    import asyncio

    from rollout_common import json_logs, tracing

    from .settings import InvalidSettings, parse_settings

    try:
        settings = parse_settings(arguments, os.environ)
        json_logs.configure_logging(
            settings.log_level, settings.log_format, quiet=json_logs.WORKER_QUIET_LOGGERS
        )
        tracing.start_tracing("rollout-worker")
        asyncio.run(_run(settings))
    except (InvalidSettings, tracing.TracingUnavailable) as error:
        sys.stderr.write(f"rollout-worker: {error}\n")
        return EXIT_BAD_SETTINGS


async def _run(settings: WorkerSettings) -> NoReturn:
    import logging

    from rollout_common.tracing import stop_tracing

    from .gang.gang_addresses import make_gang
    from .ports.member_port import serve_member
    from .ports.server import serve_worker

    gang = make_gang(settings)
    if gang is not None and gang.rank > 0:
        code = await serve_member(settings, gang)
    else:
        code = await serve_worker(settings, gang)
    # Everything is flushed and freed. An orderly end from here would keep the pod for ten more seconds: Python
    # waits for a thread that imports torch, and clears its modules.
    stop_tracing()
    logging.shutdown()
    os._exit(code)


def _openapi() -> int:
    import json

    from rollout_worker.ports.callers.auth import AllowAnyone

    from .ports.control_routes import make_control_app
    from .ports.data_routes import make_data_app
    from .service import WorkerService
    from .settings import parse_settings

    arguments = _parser().parse_args(
        ["serve", "--model", "model", "--auth", "none", "--control-host", "127.0.0.1"]
    )
    worker = WorkerService(parse_settings(arguments, {}))
    documents = {
        "data": make_data_app(worker).openapi(),
        "control": make_control_app(worker, AllowAnyone()).openapi(),
    }
    sys.stdout.write(json.dumps(documents, indent=2, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
