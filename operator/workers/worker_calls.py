"""Slow calls to workers, run while passes go on.

A pass never waits for a worker: it starts a call and ends; the end of the call wakes the pool. One
call at a time runs for each key; a pod has two, one for staging and one for all other calls. What a
call *did* is read from the worker's own state afterwards; only its failure is remembered here, for
the back-off and the message.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace

from rollout_client.worker_control import ControlError, ControlUnreachable
from rollout_common.kube.errors import KubeError
from rollout_common.wire import WeightsId
from rollout_operator.api.objects import PoolKey
from rollout_operator.core.observed_pool import FailedCall

from .settings import CALL_BACKOFF_BASE_SECONDS, CALL_BACKOFF_MAX_SECONDS, CALL_CANCEL_SECONDS

logger = logging.getLogger(__name__)


class WorkerCalls:
    """Calls in flight and failures, by key; the end of each wakes its pool.

    Args:
        after: Awaited before that with the key and what the call returned (None: it failed), to
            look at the worker again (bounded by the callee); the key stays taken until then, so that
            the next pass sees what the call did.
        clock: Monotonic seconds.
        may_start: Asked before each start; False refuses it (fenced).
        failed: Takes the key and the name of each call that failed.
    """

    def __init__(
        self,
        wake: Callable[[PoolKey], None],
        *,
        after: Callable[[str, object], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        may_start: Callable[[], bool] = lambda: True,
        failed: Callable[[PoolKey, str], None] = lambda key, name: None,
    ) -> None:
        self._wake = wake
        self._after = after
        self._clock = clock
        self._may_start = may_start
        self._failed = failed
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._failures: dict[str, dict[str, tuple[FailedCall, float]]] = {}
        """By key and the call's name, with the monotonic time of the next try."""

    def start_call(
        self,
        key: PoolKey,
        call_key: str,
        name: str,
        make: Callable[[], Awaitable[object]],
        deadline: float,
        about: WeightsId | None = None,
        *,
        instead_of: Collection[str] = (),
    ) -> bool:
        """Start a call unless another one is in flight for the key.

        Args:
            key: The pool to wake at the end.
            call_key: The pod's uid, or the uid and the kind of call.
            name: What is called; failures are kept by it.
            make: Makes the awaitable; its result is for `after` alone.
            deadline: Seconds after which the call is cancelled and has failed.
            about: The weights that it is about; failures are counted as long as these stay the same.
            instead_of: Names of calls that this one replaces. The worker may go on with them; their
                answers are ignored.

        Returns:
            False if the key is busy, or if this process may not act.
        """
        if not self._may_start():
            return False
        if (before := self._running.get(call_key)) is not None:
            if before[0] not in instead_of:
                return False
            logger.info(
                "%s is given up for %s", before[0], name, extra={"pool": str(key), "call": call_key}
            )
            before[1].cancel()
        task = asyncio.create_task(
            self._run_call(key, call_key, name, make, deadline, about),
            name=f"{name} {key} {call_key}",
        )
        self._running[call_key] = (name, task)
        # Not a `finally` in the task: one that is cancelled before its first step never gets there.
        task.add_done_callback(lambda task: self._end_call(key, call_key, task))
        return True

    def running_call(self, call_key: str) -> str | None:
        """Return the name of the call in flight."""
        entry = self._running.get(call_key)
        return entry[0] if entry else None

    def call_failures(self, call_key: str) -> dict[str, FailedCall]:
        """Return all failures of a key, by the call's name; `retry_in` is negative once that time is over."""
        now = self._clock()
        known = self._failures.get(call_key, {})
        return {name: replace(failed, retry_in=at - now) for name, (failed, at) in known.items()}

    def forget_calls(self, call_key: str) -> None:
        """Drop everything about a key and cancel its call, because the pod is gone."""
        self._failures.pop(call_key, None)
        entry = self._running.get(call_key)
        if entry:
            entry[1].cancel()

    async def cancel_all(self) -> None:
        """Cancel every call and wait, not for long, until all have ended."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CALL_CANCEL_SECONDS)

    async def _run_call(
        self,
        key: PoolKey,
        call_key: str,
        name: str,
        make: Callable[[], Awaitable[object]],
        deadline: float,
        about: WeightsId | None,
    ) -> None:
        answer: object = None
        try:
            async with asyncio.timeout(deadline):
                answer = await make()
        except TimeoutError:
            self._note_failure(key, call_key, name, f"no answer within {deadline:g} s", about)
        except ControlError as error:
            self._note_failure(key, call_key, name, error.detail, about, slug=error.slug or None)
        except (ControlUnreachable, KubeError) as error:
            self._note_failure(key, call_key, name, str(error), about)
        except Exception as error:
            logger.exception("%s failed", name, extra={"pool": str(key), "call": call_key})
            self._note_failure(key, call_key, name, f"{type(error).__name__}: {error}", about)
        else:
            self._failures.get(call_key, {}).pop(name, None)
        if self._after is not None:
            await self._after(call_key, answer)

    def _end_call(self, key: PoolKey, call_key: str, task: asyncio.Task[None]) -> None:
        if (entry := self._running.get(call_key)) is not None and entry[1] is task:
            del self._running[call_key]
        self._wake(key)

    def _note_failure(
        self,
        key: PoolKey,
        call_key: str,
        name: str,
        message: str,
        about: WeightsId | None,
        *,
        slug: str | None = None,
    ) -> None:
        self._failed(key, name)
        failures = self._failures.setdefault(call_key, {})
        before = failures[name][0] if name in failures else None
        count = before.count + 1 if before and before.about == about else 1
        delay = min(CALL_BACKOFF_MAX_SECONDS, CALL_BACKOFF_BASE_SECONDS * 2.0 ** min(count - 1, 10))
        failures[name] = FailedCall(message, count, delay, slug, about), self._clock() + delay
        logger.info(
            "%s failed (%d): %s", name, count, message, extra={"pool": str(key), "call": call_key}
        )
