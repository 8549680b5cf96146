"""`rollout`, and the same as kubectl's plugin `kubectl rollout-pool`: parses, runs a verb, says what failed."""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from rollout_client.errors import ClusterError, RolloutError
from rollout_client.local.up_command import add_up_parser, parse_count
from rollout_common.wire import MAX_IDENTITY

from .collect_verb import run_collect
from .command_output import (
    EXIT_FAILED,
    EXIT_UNREAD,
    CommandFailed,
    drop_output,
    make_printable,
    prepare_output,
)
from .generate_verb import parse_ids, run_generate
from .pool_access import PoolAccess, explain_error, open_pool
from .settings import DEFAULT_WAIT_SECONDS
from .status_verb import run_status, run_turns
from .steer_verbs import STATES, parse_wait, run_publish, run_state, run_wait
from .why_verb import run_why

RunVerb = Callable[[argparse.Namespace, PoolAccess], Awaitable[int]]
Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

EXITS = "Exit status: 0: done; 1: it failed, or what was waited for did not come; 2: wrong usage."


def make_parser(program: str) -> argparse.ArgumentParser:
    """Return the parser of the command that is called like this."""
    made = argparse.ArgumentParser(
        prog=program, description="Look at pools of rollout workers and steer them.", epilog=EXITS
    )
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")
    if program == "rollout":
        add_up_parser(verbs)
    _add_reading_verbs(verbs)
    _add_steering_verbs(verbs)
    return made


def _add_reading_verbs(verbs: Verbs) -> None:
    status = _add_verb(verbs, "status", run_status, "show a pool, its replicas, pods and weights")
    status.add_argument("pool", nargs="?", type=parse_name, metavar="POOL", help="default: all")
    status.add_argument("-w", "--watch", action="store_true", help="show each change, until Ctrl-C")
    _add_output(status)
    why = _add_pool_verb(verbs, "why", run_why, "say what is wrong with a pool and what to do")
    why.epilog = (
        f"{EXITS} 1 also if a cause was found, or the pool is not yet what its spec asks for."
    )
    _add_output(why)
    _add_facts_options(why)
    turns = _add_pool_verb(
        verbs, "turns", run_turns, "show who has the devices shared with a trainer"
    )
    _add_output(turns)
    collect = _add_pool_verb(
        verbs, "collect", run_collect, "write all that is known into an archive"
    )
    collect.add_argument(
        "--file", type=Path, help="default: rollout-NAMESPACE-POOL-TIME.tar.gz in this folder"
    )
    _add_facts_options(collect)
    generate = _add_pool_verb(verbs, "generate", run_generate, "generate with a pool")
    generate.add_argument("text", nargs="?", type=parse_text, metavar="TEXT", help="prompt")
    generate.add_argument("--ids", type=parse_ids, help="token ids instead of a text: 1,2,3")
    generate.add_argument(
        "--max-tokens", type=parse_count, default=64, metavar="N", help="default: 64"
    )
    generate.add_argument(
        "--adapter", type=parse_text, metavar="NAME", help="LoRA adapter of the active weights"
    )
    generate.add_argument("--temperature", type=parse_temperature, default=0.0, help="default: 0")
    generate.add_argument(
        "--token-file", type=Path, help="token of the data port, if it wants one; only in a pod"
    )
    _add_output(generate)


def _add_steering_verbs(verbs: Verbs) -> None:
    wait = _add_pool_verb(verbs, "wait", run_wait, "wait until a pool is ready, or has weights")
    wait.add_argument(
        "--for",
        dest="wanted",
        type=parse_wait,
        default="ready",
        metavar="WHAT",
        help="ready (the default), asleep, suspended, weights=VERSION or weights=EPOCH/VERSION (or newer ones)",
    )
    publish = _add_pool_verb(
        verbs, "publish", run_publish, "make a pool serve the weights of a folder"
    )
    publish.add_argument(
        "path",
        nargs="?",
        type=parse_text,
        metavar="PATH",
        help="folder below the weights claim; default: the version",
    )
    publish.add_argument(
        "--version", type=parse_version, metavar="N", help="default: the next one of the target"
    )
    publish.add_argument(
        "--take-over",
        action="store_true",
        help="even if a trainer, or an earlier publish, took the pool: a trainer is shut out",
    )
    texts = {"sleep": "release the memory of", "wake": "wake", "pause": "pause", "resume": "resume"}
    changing = []
    for name in STATES:
        changing.append(_add_pool_verb(verbs, name, run_state, f"{texts[name]} a pool's engines"))
        changing[-1].add_argument("--no-wait", action="store_true", help="only ask for it")
    for each in (wait, publish, *changing):
        each.add_argument(
            "--timeout",
            type=parse_seconds,
            default=DEFAULT_WAIT_SECONDS,
            metavar="SECONDS",
            help=f"default: {DEFAULT_WAIT_SECONDS:g}",
        )


def _add_pool_verb(verbs: Verbs, name: str, run: RunVerb, text: str) -> argparse.ArgumentParser:
    made = _add_verb(verbs, name, run, text)
    made.add_argument("pool", type=parse_name, metavar="POOL", help="name of the RolloutReplica")
    return made


def _add_verb(verbs: Verbs, name: str, run: RunVerb, text: str) -> argparse.ArgumentParser:
    made = verbs.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=EXITS
    )
    made.set_defaults(run_verb=run)
    made.add_argument(
        "-n", "--namespace", type=parse_name, help="default: that of the context, or of the pod"
    )
    made.add_argument("--context", help="of the kubeconfig; default: its current one")
    made.add_argument(
        "--kubeconfig", help="file; default: $KUBECONFIG, the pod's account, ~/.kube/config"
    )
    made.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="say on stderr what is being done; default: on a terminal",
    )
    return made


def _add_output(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="default: text"
    )


def _add_facts_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--operator-namespace",
        type=parse_name,
        default="rollout-system",
        metavar="NAMESPACE",
        help="where the operator runs; default: rollout-system",
    )
    verb.add_argument(
        "--token-file",
        type=Path,
        help="token for the control ports, where pods can be reached; default: the mounted one",
    )


def parse_name(text: str) -> str:
    """Return a name of a Kubernetes object, which becomes a part of paths."""
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} can't be the name of a Kubernetes object: use a-z, 0-9 and -"
        )
    return text


def parse_text(text: str) -> str:
    """Return a text that can be sent; one that is not UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError("give it as UTF-8") from error
    return text


def parse_temperature(text: str) -> float:
    """Return a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"give a number of at least 0, such as 0.7, not {text!r}")
    return value


def parse_version(text: str) -> int:
    """Return a weights version of at least 1."""
    version = parse_count(text)
    if version > MAX_IDENTITY:
        raise argparse.ArgumentTypeError(f"give at most {MAX_IDENTITY}, not {text}")
    return version


def parse_seconds(text: str) -> float:
    """Return a number of seconds above 0; `90s`, `10m` and `2h` as kubectl has them."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([smh]?)", text)
    seconds = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if not seconds:
        raise argparse.ArgumentTypeError(f"give seconds above 0, such as 90 or 10m, not {text!r}")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `rollout`; return its exit status."""
    return run_command("rollout", arguments)


def run_plugin(arguments: Sequence[str] | None = None) -> int:
    """Run kubectl's plugin; return its exit status."""
    return run_command("kubectl rollout-pool", arguments)


def run_command(program: str, arguments: Sequence[str] | None) -> int:
    """Run the command line; return its exit status."""
    prepare_output()
    made = make_parser(program)
    given = made.parse_args(arguments)
    if given.verb == "generate" and (given.text is None) == (given.ids is None):
        made.error("generate: give a TEXT or --ids, one of both")
    if given.verb == "publish" and given.path is None and given.version is None:
        made.error("publish: give a PATH, or --version")
    try:
        if given.verb == "up":
            status: int = given.run(given)
            return status
        return asyncio.run(_run_verb(given))
    except BrokenPipeError:
        drop_output()
        return EXIT_UNREAD
    except (CommandFailed, RolloutError, OSError) as error:
        sys.stderr.write(f"{program} {given.verb}: {make_printable(str(error))}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


async def _run_verb(given: argparse.Namespace) -> int:
    pool = open_pool(given)
    run: RunVerb = given.run_verb
    async with pool.kube:
        try:
            return await run(given, pool)
        except ClusterError as error:
            raise CommandFailed(await explain_error(error, pool)) from error


if __name__ == "__main__":
    sys.exit(main())
