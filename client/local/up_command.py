"""`rollout up`: a pool of workers on this machine, until Ctrl-C. No cluster, no root."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from pathlib import Path

from .local_workers import LocalPlan, LocalWorkers, visible_devices

_HOW_TO = """
{count} serving after {seconds:.0f} s. In Python:

from rollout_client import DirectOptions, RolloutPool

with RolloutPool.from_urls(
    {urls},
    control_urls={controls},
    direct=DirectOptions(token={token!r}),
) as pool:
    result = pool.generate([1, 2, 3], sampling={{"max_tokens": 8}})
    print(result.token_ids, result.logprobs)
    # pool.acquire(); pool.publish_weights(1, tensors=model.state_dict())

In a shell:

curl {url}/v1/generate -H 'content-type: application/json' \\
  -d '{{"token_ids": [1, 2, 3], "sampling": {{"max_tokens": 8}}}}'

Ctrl-C ends them."""


def add_up_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `up` to the verbs of the command."""
    up = verbs.add_parser(
        "up",
        help="start workers on this machine, until Ctrl-C",
        usage="rollout up --model PATH [options] [-- FLAGS of rollout-worker serve]",
        description="Start workers on this machine, show how to use them, and end them with Ctrl-C. They listen "
        "on 127.0.0.1 only.",
        epilog="What follows `--` goes to each worker: `-- --dtype bfloat16 --max-length 4096`; "
        "`rollout-worker serve --help` lists all flags.",
    )
    up.add_argument("--engine", choices=("hf", "vllm", "sglang"), default="hf", help="default: hf")
    up.add_argument(
        "--model", required=True, help="folder of the checkpoint, or a repository on the Hub"
    )
    up.add_argument("--replicas", type=parse_count, default=1, metavar="N", help="default: 1")
    up.add_argument(
        "--port",
        type=parse_count,
        default=8000,
        metavar="N",
        help="data port of the first worker (default: 8000); its control port is the next one, and its port for "
        "weights the one after. Other workers follow at distances of 10",
    )
    up.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="GPUs for each worker; default: 1 if there are enough of them, else 0: the engine chooses",
    )
    up.add_argument(
        "--folder",
        type=Path,
        help="folder for logs, which stay then; default: a temporary one, which is deleted",
    )
    up.add_argument("flags", nargs="*", metavar="FLAGS", help=argparse.SUPPRESS)
    up.set_defaults(run=run_local_pool)


def run_local_pool(given: argparse.Namespace) -> int:
    """Run a pool; return the exit status 0 after Ctrl-C, SIGTERM or SIGHUP.

    Raises:
        LocalPoolFailed: A worker ended or could not be started.
        OSError: The folder can't be used, or nobody reads the output any more.
    """
    enough = len(visible_devices()) >= given.replicas
    plan = LocalPlan(
        engine=given.engine,
        model=given.model,
        replicas=given.replicas,
        port=given.port,
        gpus=(1 if enough else 0) if given.gpus is None else given.gpus,
        flags=tuple(given.flags),
    )
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores the end of the terminal
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        with contextlib.ExitStack() as stack:
            folder: Path | None = given.folder
            if folder is None:
                kept = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-"))
                folder = Path(kept)
            folder.mkdir(parents=True, exist_ok=True)
            _run_until_interrupted(plan, folder)
    except KeyboardInterrupt:
        pass
    return 0


def _run_until_interrupted(plan: LocalPlan, folder: Path) -> None:
    began = time.monotonic()
    _report_line(f"logs: {folder}/worker-*.log")
    with LocalWorkers(plan, folder, _report_line) as pool:
        pool.wait_until_ready()
        urls = [each.data_url for each in pool.workers]
        _report_line(
            _HOW_TO.format(
                count=plan.replicas,
                seconds=time.monotonic() - began,
                urls=urls,
                controls=[each.control_url for each in pool.workers],
                token=pool.token,
                url=urls[0],
            )
        )
        pool.watch_workers()


def _report_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def parse_count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"give a whole number of at least 1, not {text!r}")
    return int(text)
