"""Pushed weights on the heads of a pool with an operator, before its target moves."""

from __future__ import annotations

import time

from rollout_client.errors import PublishFailed

from .control_ports import ControlPorts
from .pushing.push import Push
from .settings import SLOW_HEAD_SECONDS
from .staging_barrier import Barrier, Version
from .steering_protocol import OnProgress


async def stage_on_heads(
    heads: ControlPorts | None, version: Version, push: Push, until: float, tell: OnProgress
) -> Barrier:
    """Bring the bytes to every head that has loaded: those that don't serve yet heal by them.

    Args:
        heads: Control ports of the members.
        version: What is published.
        push: Brings the bytes.
        until: Deadline on the monotonic clock.
        tell: Called with how far it is.

    Raises:
        PublishFailed: A head that serves can't use the weights, or it took too long.
        SteeringFailed: No head answers, or one refuses to.
        EpochLost: Another trainer has the pool.
    """
    heads = head_ports(heads)
    patience = min(SLOW_HEAD_SECONDS, until - time.monotonic())
    states = await heads.get_states(patience)
    loaded = [name for name, state in states.items() if state.resident.weights]
    waiting = [name for name in loaded if not states[name].serving]
    barrier = Barrier(heads, version, loaded, push=push, spared=waiting)
    await barrier.stage(until, tell)
    return barrier


def head_ports(heads: ControlPorts | None) -> ControlPorts:
    """Return them.

    Raises:
        PublishFailed: There are none.
    """
    if heads is None:
        raise PublishFailed("this pool knows no control ports: make it with from_cluster")
    return heads
