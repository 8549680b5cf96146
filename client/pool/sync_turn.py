"""The turn on devices that are shared with a pool, for programs without an event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_client.turn.rounds import Vote
from rollout_client.turn.session import Session

from .loop_thread import LoopThread


def follow_here(session: Session, thread: LoopThread) -> None:
    """Do the steps of a turn; votes are cast in the caller's thread, which alone has the right device.

    Raises:
        RolloutError: The turn was not had.
    """
    steps = session.steps()
    send: Callable[[Any], Any] = steps.send
    value: Any = None
    while True:
        try:
            step = send(value)
        except StopIteration:
            return
        try:
            send, value = steps.send, True
            if isinstance(step, Vote):
                value = session.agreed(step.yes)
            elif step == "begin":
                session.begin()
            elif step == "give":
                session.give()
            else:
                thread.call(session.do(step))
        except BaseException as error:  # noqa: BLE001  # the rounds say what it means
            send, value = steps.throw, error
