"""A trainer's process that has a worker embedded, and nothing else to do: the contract suite sees its ports and its log.

python embedded_serve.py --model FOLDER FLAGS…
"""

from __future__ import annotations

import argparse
import signal
import threading

from rollout_common import json_logs
from rollout_worker.embedded import Worker
from rollout_worker.settings import add_flags

LOOK_SECONDS = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    json_logs.configure_logging("info", "json", quiet=json_logs.WORKER_QUIET_LOGGERS)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with Worker(**given) as worker:
        while worker.running and not ended.wait(LOOK_SECONDS):
            pass
        died = not worker.running
    raise SystemExit(1 if died else 0)


if __name__ == "__main__":
    main()
