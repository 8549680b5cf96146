"""A worker of its own process that waits for pushed weights: `python replica_process.py FOLDER`.

Writes port and ticket as JSON; at the end of its input it writes the root hash that it staged.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from rollout_worker.updates import pushed_weights
from tests.support.unit.pushing import pushed_worker, stage


async def main(folder: Path) -> None:
    setattr(pushed_weights, "check_layout", lambda *_, where: None)  # noqa: B010
    async with pushed_worker(folder) as worker:
        begun = await stage(worker, 1)
        assert begun.transfer is not None
        _say({"port": begun.transfer.port, "ticket": begun.transfer.ticket})
        await asyncio.to_thread(sys.stdin.read)
        slot = worker.updates.slot
        assert slot is not None
        _say({"root_hash": slot.to_view().root_hash})


def _say(told: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
