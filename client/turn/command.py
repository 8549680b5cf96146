"""`rollout-turn`: the turn for trainers that are not written in Python, and its holders now.

    rollout-turn run [--pool NAME] [--devices A,B] [--directory D] [--timeout S] -- CMD …
    rollout-turn status [--directory D]

CMD inherits the open lock files: kill -9 of `rollout-turn` alone frees nothing, the turn ends with the
last process that has them. Exit status: that of CMD; 128 + N if signal N ended it or ended the wait; 124 if
the turn did not come in time, 125 if it could not be asked for, 126 or 127 if CMD can't be run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from rollout_client.cluster_client import ClusterClient, load_access
from rollout_client.errors import RolloutError, SteeringFailed, TurnFailed
from rollout_client.hooks import Hook
from rollout_client.steering.cluster_steering import ClusterSteering
from rollout_client.steering.steering_verbs import SteeringVerbs
from rollout_common.turn import TurnError
from rollout_common.turn.lock_files import holders

from .plan import (
    DEFAULT_LOCK_DIRECTORY,
    ENV_DEVICES,
    ENV_DIRECTORY,
    TurnPlan,
    given_devices,
    lock_directory,
)
from .session import TurnSession
from .settings import UNLIMITED_SECONDS
from .turn_devices import pod_devices, query_pod_devices

EXIT_NOT_ACQUIRED, EXIT_NOT_ASKED, EXIT_NOT_RUN, EXIT_NOT_FOUND = 124, 125, 126, 127

FORWARDED_SIGNALS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
TERMINAL_SIGNALS = {signal.SIGINT, signal.SIGQUIT}
"""Not forwarded on a terminal, which sends them to the command itself."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    made = argparse.ArgumentParser(
        prog="rollout-turn",
        description="Take turns on accelerators with a pool of rollout workers.",
        epilog="See docs/share-gpus.md for what a trainer's pod needs.",
    )
    verbs = made.add_subparsers(dest="verb", required=True, metavar="run|status")
    run = verbs.add_parser(
        "run",
        help="run a command while its devices are its own",
        usage="rollout-turn run [options] -- CMD [ARG …]",
        description="Take the node's locks for the devices, run CMD, exit with its status. CMD and the "
        "processes that inherit the lock files from it keep the turn until all have ended.",
        epilog="Exit status: CMD's; 128+N: signal N; 124: the turn did not come in time (the message names "
        "its holder); 125: it could not be asked for; 126, 127: CMD can't be run or was not found.",
    )
    _add_run_options(run)
    status = verbs.add_parser(
        "status",
        help="list the holder of each device",
        description="One line a device: its name, a tab, its holder.",
    )
    for each in (run, status):
        each.add_argument(
            "--directory",
            help=f"the node's lock directory (default: ${ENV_DIRECTORY}, else {DEFAULT_LOCK_DIRECTORY})",
        )
    return made


def _add_run_options(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--devices",
        help=f"names of the devices, separated by commas (default: ${ENV_DEVICES}, else the devices of "
        "this pod's ResourceClaims, which the role rollout-trainer may read)",
    )
    run.add_argument(
        "--timeout",
        type=_parse_seconds,
        default=UNLIMITED_SECONDS,
        metavar="SECONDS",
        help="how long to wait for the pool and the locks together (default: without end)",
    )
    run.add_argument(
        "--pool",
        help="name of the RolloutReplica that sleeps during the turn (default: no pool is asked; its workers "
        "keep the turn until they sleep)",
    )
    run.add_argument("--namespace", help="of the pool (default: the pod's)")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="CMD", help="what to run")


def _parse_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= UNLIMITED_SECONDS:
        raise argparse.ArgumentTypeError(f"give a number of seconds above 0, not {text!r}")
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    made = make_parser()
    options = made.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="rollout-turn: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if options.verb == "status":
        sys.exit(print_status(lock_directory(options.directory)))
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        made.error("run: give the command to run after --")
    if options.namespace and not options.pool:
        made.error("run: --namespace is the pool's: give --pool")
    sys.exit(asyncio.run(run_with_turn(options, command)))


def print_status(directory: Path) -> int:
    """Print the holder of each device; return the exit status."""
    try:
        found = holders(directory)
    except TurnError as error:
        return _print_refusal(error)
    for device, holder in found.items():
        print(f"{device}\t{'free' if holder is None else holder}")  # noqa: T201
    return 0


async def run_with_turn(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Take the turn, run the command; return the exit status."""
    try:
        session, close = make_session(options)
    except (RolloutError, ValueError) as error:
        return _print_refusal(error)
    with SignalForwarder() as signals:
        try:
            await signals.run_cancellable(session.acquire_turn())
        except SignalInterrupt as error:
            return 128 + error.number
        except (TurnFailed, SteeringFailed) as error:
            late = isinstance(error, SteeringFailed) or bool(error.waiting_for)
            return _print_refusal(error, EXIT_NOT_ACQUIRED if late else EXIT_NOT_ASKED)
        except RolloutError as error:
            return _print_refusal(error)
        else:
            ended = await run_command(command, session, signals)
            return await _finish_command(session, ended)
        finally:
            await close()


async def _finish_command(session: TurnSession, ended: int) -> int:
    # The locks fall when this process ends, unless processes of CMD are left.
    try:
        await session.ask_awake()
    except RolloutError as error:
        _print_failure(f"the pool was not woken: {error}", ended)
    return ended


def make_session(options: argparse.Namespace) -> tuple[TurnSession, Callable[[], Awaitable[None]]]:
    """Return a session, and a function that closes its connections.

    Raises:
        ClusterError: No credentials work.
        ValueError: The options contradict each other.
    """
    devices = options.devices.split(",") if options.devices else None
    plan = TurnPlan(
        devices=given_devices([each.strip() for each in devices] if devices else None),
        directory=options.directory,
        seconds=options.timeout,
        serving=False,
    )
    if options.pool is None:
        return TurnSession(None, plan, pod_devices), _close_nothing
    found = load_access()
    kube = ClusterClient(found)
    namespace = options.namespace or found.namespace
    steering = ClusterSteering(kube, options.pool, namespace)
    find = partial(query_pod_devices, kube, namespace)
    return TurnSession(SteeringVerbs(steering, Hook()), plan, find), steering.close


class SignalInterrupt(Exception):
    """The signal `number` ended the wait."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class SignalForwarder:
    """Receives the signals of this process inside a `with` block."""

    def __init__(self) -> None:
        self._received: list[signal.Signals] = []
        self._on_signal: Callable[[], object] = lambda: None

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for each in FORWARDED_SIGNALS:
            loop.add_signal_handler(each, self._note_signal, each)
        return self

    def __exit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for each in FORWARDED_SIGNALS:
            loop.remove_signal_handler(each)

    def _note_signal(self, number: signal.Signals) -> None:
        self._received.append(number)
        self._on_signal()

    async def run_cancellable(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work that a signal cancels; a signal that comes too late waits for `forward_to`.

        Raises:
            SignalInterrupt: A signal cancelled it.
        """
        task = asyncio.ensure_future(work)
        self._on_signal = task.cancel
        try:
            await task
        except asyncio.CancelledError:
            if not self._received:
                raise
            raise SignalInterrupt(self._received[0]) from None

    def forward_to(self, child: asyncio.subprocess.Process) -> None:
        """Send the signals so far, and all later ones, to a process."""

        def forward() -> None:
            while self._received:
                number = self._received.pop(0)
                if not (number in TERMINAL_SIGNALS and os.isatty(0)):
                    with contextlib.suppress(ProcessLookupError):
                        child.send_signal(number)

        self._on_signal = forward
        forward()


async def run_command(
    command: Sequence[str], session: TurnSession, signals: SignalForwarder
) -> int:
    """Run a command that shares the turn; return its exit status as a shell would."""
    environment = {**os.environ, **session.command_environment}
    try:
        child = await asyncio.create_subprocess_exec(
            *command, pass_fds=session.held_turn.filenos, env=environment
        )
    except FileNotFoundError:
        return _print_failure(f"{command[0]} was not found", EXIT_NOT_FOUND)
    except OSError as error:
        return _print_failure(f"{command[0]} can't be run: {error.strerror}", EXIT_NOT_RUN)
    signals.forward_to(child)
    ended = await child.wait()
    return ended if ended >= 0 else 128 - ended


async def _close_nothing() -> None:
    return None


def _print_refusal(error: Exception, code: int = EXIT_NOT_ASKED) -> int:
    return _print_failure("; ".join([str(error), *getattr(error, "__notes__", ())]), code)


def _print_failure(why: str, code: int) -> int:
    print(f"rollout-turn: {why}", file=sys.stderr)  # noqa: T201
    return code


if __name__ == "__main__":
    main()
