"""Entry points of the commands: Ctrl-C ends each one quietly with status 130, also while it imports.

The functions name their modules as text: imports of this package point down, and nothing may be imported before
the signal is handled.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import NoReturn

EXIT_INTERRUPTED = 130
"""As of a shell's command that SIGINT has ended: 128 + 2."""


def run_script(module: str, function: str = "main") -> NoReturn:
    """Import a module, call a function of it, and exit with what it returns."""
    # A shell has its background jobs ignore the signal, and Python leaves that so.
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if handled:
            # Not an exception: the imports that it passes through may swallow it or print it.
            signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
        run = getattr(importlib.import_module(module), function)
        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(run())
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def run_operator() -> NoReturn:
    """Run `rollout-operator`."""
    run_script("rollout_operator.__main__")


def run_worker() -> NoReturn:
    """Run `rollout-worker`."""
    run_script("rollout_worker.__main__")


def run_turn() -> NoReturn:
    """Run `rollout-turn`."""
    run_script("rollout_client.turn.command")


def run_rollout() -> NoReturn:
    """Run `rollout`."""
    run_script("rollout_client.commands.rollout_command")


def run_kubectl_plugin() -> NoReturn:
    """Run `kubectl rollout-pool`."""
    run_script("rollout_client.commands.rollout_command", "run_plugin")
