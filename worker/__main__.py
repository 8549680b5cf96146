"""Command line of the worker: `rollout-worker serve`, `rollout-worker openapi`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence

from . import logs
from .settings import BadSettings, add_flags, parse

EXIT_BAD_SETTINGS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "openapi":
        return _openapi()
    return _serve(arguments)


def _parser() -> argparse.ArgumentParser:
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
    # Imported late so that --help and bad flags answer at once.
    from .ports.server import serve

    try:
        settings = parse(arguments, os.environ)
        logs.configure(settings.log_level, settings.log_format)
        code = asyncio.run(serve(settings))
    except BadSettings as error:
        sys.stderr.write(f"rollout-worker: {error}\n")
        return EXIT_BAD_SETTINGS
    # Everything is flushed and freed; taking torch's modules down one by one would cost ten
    # seconds in which the pod holds its place.
    logging.shutdown()
    os._exit(code)


def _openapi() -> int:
    from .ports.auth import Anyone
    from .ports.control import control_app
    from .ports.data import data_app
    from .service import Worker

    arguments = _parser().parse_args(
        ["serve", "--model", "model", "--auth", "none", "--control-host", "127.0.0.1"]
    )
    worker = Worker(parse(arguments, {}))
    documents = {
        "data": data_app(worker).openapi(),
        "control": control_app(worker, Anyone()).openapi(),
    }
    sys.stdout.write(json.dumps(documents, indent=2, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
