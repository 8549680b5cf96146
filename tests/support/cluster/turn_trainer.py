"""A trainer that learns nothing: it takes turns with a pool, and marks the devices' memory as its own.

    python turn_trainer.py POOL NAMESPACE

Runs in a pod. Each turn lasts as long as training would; then the pool may serve for as long.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from rollout_client import RolloutError, RolloutPool

logger = logging.getLogger("trainer")

TRAINING_SECONDS = 0.5
ROLLOUT_SECONDS = float(os.environ["ROLLOUT_SECONDS"])


def train() -> None:
    """Have memory of every device for a while; the judge sees these locks."""
    with ExitStack() as marks:
        for device in sorted(Path("/dev").glob("gpu-*")):
            fcntl.flock(marks.enter_context(device.open()), fcntl.LOCK_SH)
        time.sleep(TRAINING_SECONDS)
    logger.info("trained")


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    name, namespace = sys.argv[1:]
    with RolloutPool.from_cluster(name, namespace) as pool:
        for turn in itertools.count(1):
            try:
                with pool.turn(seconds=60):
                    train()
            except RolloutError as error:
                # An outage, a pool that heals: what the turn guarantees is not that nothing fails.
                logger.warning("turn %d failed: %s", turn, error)
                time.sleep(1)
                continue
            logger.info("turn %d of %s", turn, os.environ["POD_NAME"])
            time.sleep(ROLLOUT_SECONDS)


if __name__ == "__main__":
    main()
