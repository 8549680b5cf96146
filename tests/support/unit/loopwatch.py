"""How long an event loop was held at most, in seconds of this process's own work.

What other processes do meanwhile does not count: a loaded machine holds no loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

BEAT_SECONDS = 0.002


class Watch:
    """The longest time between two beats of the loop so far."""

    seconds = 0.0

    async def _beat(self) -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(BEAT_SECONDS)
            self.seconds = max(self.seconds, time.process_time() - before)


@contextlib.asynccontextmanager
async def watched() -> AsyncIterator[Watch]:
    """Watch the running loop until the block ends."""
    watch = Watch()
    beating = asyncio.create_task(watch._beat())
    await asyncio.sleep(2 * BEAT_SECONDS)
    try:
        yield watch
        await asyncio.sleep(2 * BEAT_SECONDS)  # a beat that was late has been counted
    finally:
        beating.cancel()
