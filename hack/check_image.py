#!/usr/bin/env python3
"""Check an image without a GPU: would it start on one?

    sudo python3 hack/check_image.py localhost/rollout-worker-vllm:gpu --engine vllm

Commands run as a pod would run them: the image's own user, a root file system that can't be written,
the command as PID 1, no network. One line for each check; the exit status is 1 if one fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "cluster"))

from buildah import Store
from imagecheck import versions
from imagecheck.box import opened
from imagecheck.checks import Failed, checks
from localkube import ClusterError, preflight
from localkube.home import cache, say

MOST_SHOWN = 6
"""Problems of a check that are printed in full."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("image", help="a reference in the store")
    parser.add_argument(
        "--store", type=Path, default=cache() / "buildah-gpu",
        help="folder of buildah's store (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--engine", choices=versions.ENGINES, help="which one it should hold")
    arguments = parser.parse_args()
    try:
        preflight.root("checking an image")
        return check(Store(arguments.store.absolute()), arguments.image, arguments.engine)
    except ClusterError as error:
        say(f"error: {error}")
        return 2


def check(store: Store, reference: str, engine: str | None = None) -> int:
    """Check an image; returns the exit status. `engine`: which one it should hold, if that is known."""
    failed = 0
    print(f"{reference}", flush=True)
    with opened(store, reference) as box:
        for name, run in checks(box, engine):
            began = time.monotonic()
            try:
                verdict = run()
                seen, problems = verdict.seen, verdict.problems
            except Failed as error:
                seen, problems = "", [str(error)]
            failed += _line(name, seen, problems, time.monotonic() - began)
    print(
        f"{reference}: {f'{failed} checks failed' if failed else 'all checks passed'}", flush=True
    )
    return 1 if failed else 0


def _line(name: str, seen: str, problems: list[str], seconds: float) -> bool:
    word = "FAIL" if problems else "ok  "
    more = f"; and {len(problems) - MOST_SHOWN} more" if len(problems) > MOST_SHOWN else ""
    text = "; ".join(problems[:MOST_SHOWN]) + more if problems else seen
    print(f"  {word} {name:<14} {seconds:6.1f} s  {text}", flush=True)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
