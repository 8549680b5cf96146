"""Keeps the connections between the ranks of a trainer, from one publish to the next."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rollout_client.steering.pushing.options import PushWork
from rollout_client.steering.pushing.push import Push, Ranks
from rollout_client.steering.pushing.push_tensors import Dtypes, Given
from rollout_client.steering.pushing.pusher import Begin, Pusher
from rollout_client.steering.pushing.shards.merged_version import MergedVersion
from rollout_client.steering.spool import run_to_end
from rollout_client.steering.steering_protocol import Published

from .rank_follower import MeetingLeft, RankFollower
from .rank_rendezvous import meet
from .rank_zero import RankZero

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RankConnections:
    """This process's part in all groups of ranks that publish to a pool."""

    def __init__(self, pusher: Pusher) -> None:
        self._pusher = pusher
        self._met: tuple[ProcessGroup, RankZero | RankFollower] | None = None

    def _meet(self, work: PushWork) -> RankZero | RankFollower:
        """Return this rank's part in its group; the first call is a collective operation of all ranks.

        A rank that is too late for a version does not wait for the others, which have ended it and may be at the next.

        Raises:
            ValueError: This process is not in the group.
            PublishFailed: A rank can't reach rank 0; all ranks raise the same.
        """
        group = work.plan.ranks
        assert group is not None
        if self._met is not None:
            known, ranks = self._met
            if known is group and (not ranks.broken or ranks.has_missed(work.version)):
                return ranks
            ranks.close(meets=known is group)
            self._met = None
        met = meet(group, work.plan.reach)
        self._met = group, met
        return met

    async def publish(
        self, work: PushWork, push: Callable[[Begin], Awaitable[Published]]
    ) -> Published:
        """Publish with all other ranks of a group; blocking work runs in the trainer's thread, or off the loop.

        Args:
            work: What this rank publishes.
            push: Publishes the push that its argument begins, if this rank is rank 0.

        Raises:
            RolloutError: The publish failed: either all ranks raise, or none.
        """
        ranks = await run_to_end(self._meet, work)
        if isinstance(ranks, RankFollower):
            return await run_to_end(self._take_part, ranks, work)
        try:
            done = await push(partial(self._begin, ranks, work))
        except BaseException as error:
            await run_to_end(self._tell, ranks, work.version, error)
            raise
        await run_to_end(self._tell, ranks, work.version, done)
        return done

    def _take_part(self, ranks: RankFollower, work: PushWork) -> Published:
        """Write this rank's part; once, meet the others again if they do."""
        try:
            return ranks.take_part(work)
        except MeetingLeft:  # this rank was early: others were lost in the publish before
            again = self._meet(work)
            assert isinstance(again, RankFollower), "a rank keeps its number"
            return again.take_part(work)

    def _tell(self, ranks: RankZero, version: int, outcome: Published | BaseException) -> None:
        """Send the outcome to all ranks."""
        ranks.tell(version, outcome)
        # A rank that hangs may write later, also into the memory of the base.
        if ranks.broken:
            self._pusher.forget()

    def _begin(self, ranks: RankZero, work: PushWork, dtypes: Dtypes | None) -> Push:
        """Return a push that all ranks fill."""
        plan = work.plan
        ranks.group.arena.writable = plan.transport == "nixl"
        filling = MergedVersion(ranks.group.arena, self._pusher.copier, dtypes)
        # The same for each node, so that all together keep to it.
        rate = None if plan.rate is None else plan.rate / (1 + len(ranks.group.leads))
        together = Ranks(
            partial(ranks.fill, filling, self._pusher.copier, work),
            partial(ranks.serve, rate=rate),
            lambda: ranks.source_count,
        )
        found = Given((), None, at_rest=True)
        return self._pusher.begin_filled(found, filling, replace(plan, rate=rate), together)

    def close(self) -> None:
        """Close the connections to all ranks."""
        if self._met is not None:
            self._met[1].close(meets=False)
