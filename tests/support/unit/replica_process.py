"""A worker of its own process that waits for pushed weights: `python replica_process.py FOLDER`.

Writes port and ticket as JSON; at the end of its input it writes the root hash that it staged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from rollout_worker.schemas import Transfer
from rollout_worker.updates import pushed_weights
from tests.support.unit.pushing import pushed_worker, ticket


@contextlib.asynccontextmanager
async def start_replica(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, Transfer]]:
    """A worker of its own process, and what its stage was answered."""
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, __file__, str(folder)]
    process = await asyncio.create_subprocess_exec(
        *words, env=path, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield process, Transfer.model_validate_json(await process.stdout.readline())
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def main(folder: Path) -> None:
    setattr(pushed_weights, "check_layout", lambda *_, where: None)  # noqa: B010
    async with pushed_worker(folder) as worker:
        transfer = await ticket(worker, 1)
        _say({"port": transfer.port, "ticket": transfer.ticket})
        await asyncio.to_thread(sys.stdin.read)
        slot = worker.slot
        _say({"root_hash": slot.to_view().root_hash})


def _say(told: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
