"""Conversations for real workers, many under way at once; a hook strikes after a third of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable

AT_ONCE = 32
LONGEST = 1700
"""Tokens of a conversation: the tiny model takes 2,048."""

Conversation = deque[tuple[list[int], int]]
"""Turns: what is said to the policy, and how many tokens it answers."""

Send = Callable[[str, list[int], int], Awaitable[list[int]]]
"""Sees one turn of a conversation through: its key, the prompt, how many tokens to sample."""


def conversations(turns: int, seed: int) -> list[Conversation]:
    """Return conversations whose lengths are Zipf, `turns` turns in all."""
    rng, made, left = random.Random(seed), [], turns
    while left > 0:
        length = min(left, 16, int(rng.paretovariate(1.1)))
        conversation: Conversation = deque()
        whole = 0
        for index in range(length):
            said = rng.randint(100, 300) if index == 0 else rng.randint(10, 60)
            tokens = int(min(160, rng.lognormvariate(3.4, 0.7))) + 8
            whole += said + tokens
            if whole > LONGEST:
                break
            conversation.append(([rng.randint(300, 4000) for _ in range(said)], tokens))
        left -= len(conversation)
        made.append(conversation)
    return made


class Conversations:
    """All conversations, `AT_ONCE` at a time; `seconds` of every turn.

    `strike` is called once, after a third of the turns.
    """

    def __init__(self, send: Send, work: list[Conversation], strike: Callable[[], None]) -> None:
        self._send = send
        self._work = iter(enumerate(work))
        self._turns = sum(len(each) for each in work)
        self._strike = strike
        self.seconds: list[float] = []

    async def run(self) -> float:
        """Return the makespan in seconds."""
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(self._talk())
        assert len(self.seconds) == self._turns, "a turn was lost"
        return time.perf_counter() - began

    async def _talk(self) -> None:
        for index, conversation in self._work:
            context: list[int] = []
            for said, tokens in conversation:
                context += said
                began = time.perf_counter()
                sampled = await self._send(str(index), context, tokens)
                assert len(sampled) == tokens
                context += sampled
                self.seconds.append(time.perf_counter() - began)
                if len(self.seconds) == self._turns // 3:
                    self._strike()
