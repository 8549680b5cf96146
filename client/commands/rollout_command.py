"""The command `rollout`: workers on this machine, and pools in a cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rollout_client.local.rollout_up import add_up_verb, run_up

from .pool_command import add_pool_verbs, run_pool_verb


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    made = argparse.ArgumentParser(prog="rollout", description="Rollout engines for RL.")
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")
    add_up_verb(verbs)
    add_pool_verbs(verbs)
    given = made.parse_args(arguments)
    return run_up(given) if given.verb == "up" else run_pool_verb(given)


if __name__ == "__main__":
    sys.exit(main())
