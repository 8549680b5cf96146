"""The turn on devices that are shared with a pool, for programs without an event loop."""

from __future__ import annotations

from typing_extensions import override

from rollout_client.blocking_portal import BlockingPortal
from rollout_client.turn.plan import TurnPlan
from rollout_client.turn.session import StepRunner, TurnSession, TurnStep


class BlockingStepRunner(StepRunner):
    """Does the steps in the pool's thread, and votes in the caller's, which alone has the right device.

    Nothing here waits for an event loop, so a coroutine that only waits for these methods never suspends.
    """

    def __init__(self, plan: TurnPlan, portal: BlockingPortal) -> None:
        super().__init__(plan)
        self._portal = portal

    @override
    async def run_step(self, step: TurnStep) -> None:
        self._portal.call(step())

    @override
    async def collect_votes(self, yes: bool) -> bool:
        return self._plan.all_agree(yes)


def acquire_blocking(session: TurnSession, plan: TurnPlan, portal: BlockingPortal) -> None:
    """Take the turn as `TurnSession.acquire_turn` does; the same coroutine, run to its end in the caller's thread.

    Raises:
        RolloutError: The turn was not had.
    """
    taking = session.acquire_turn(BlockingStepRunner(plan, portal))
    try:
        taking.send(None)
    except StopIteration:
        return
    taking.close()
    raise AssertionError("a step of the turn waited for an event loop")
