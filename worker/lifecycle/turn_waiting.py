"""Waiting for the devices before an engine takes memory of them: what ends such a wait."""

from __future__ import annotations

from collections.abc import Callable

from rollout_common.turn import TurnReplaced
from rollout_common.wire import Progress
from rollout_worker.core.worker_runtime import WorkerRuntime
from rollout_worker.engine import Engine, EngineCrashed, EngineError


def check_it_sleeps(runtime: WorkerRuntime, engine: Engine) -> None:
    """Refuse an engine that would keep its devices for ever.

    Raises:
        EngineError: its sleep gives no memory back, but others are to have their turns.
    """
    able = engine.capabilities
    if runtime.turn is not None and not (able.memory_release and able.sleep_levels):
        raise EngineError(
            "this engine can't give its memory back, so nobody else would get a turn: leave out what keeps"
            " it from sleeping (SGLang: --enable-memory-saver), or --turn-devices"
        )


async def turn_to_wake(runtime: WorkerRuntime, wanted: Callable[[], bool]) -> bool:
    """Wait until a sleeping engine may take memory; False if it should not any more.

    Args:
        runtime: of the worker; says in its progress who is waited for.
        wanted: whether the engine's memory is still wanted.

    Raises:
        EngineCrashed: its processes can't share any turn to come: they have to be replaced.
        EngineError: there is no way to know whose turn it is.
    """
    if runtime.turn is None:
        return True

    def report(progress: Progress) -> None:
        runtime.progress = progress

    def may() -> bool:
        return wanted() and runtime.is_alive and not runtime.shutting_down

    try:
        had = await runtime.turn.take(report, may)
        runtime.check_alive()
        return had
    except TurnReplaced as error:
        runtime.report_crash(str(error))
        raise EngineCrashed(str(error)) from error
    finally:
        runtime.progress = None
