"""Loads weights that are active again, for a sleep or wake that needs their bytes, or for a new engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from rollout_common.wire import ActiveWeights, StageSource, WeightsSource
from rollout_worker.core.worker_runtime import WorkerRuntime
from rollout_worker.engine import Engine, EngineInfo, Sink, TrainerTensors, WeightsRejected
from rollout_worker.sources import tensor_bytes
from rollout_worker.sources.pushed.pushed_source import fill_from_memory
from rollout_worker.sources.tensor_filling import SinkFilling, locate_source

from .pushed_weights import PushedWeights, fill_elsewhere
from .settings import REFILL_TIMEOUT_SECONDS
from .staging_slot import no_copy_error


class ActiveRefill:
    """Fills sinks of the running engine with weights that it has served; `engine.WeightsRefill` gives the errors."""

    def __init__(self, runtime: WorkerRuntime, pushes: PushedWeights) -> None:
        self._runtime = runtime
        self._pushes = pushes

    def _loaded_engine(self) -> tuple[Engine, EngineInfo]:
        """Return the engine, also one that does not serve yet."""
        engine, info = self._runtime.engine, self._runtime.info
        assert engine is not None
        assert info is not None
        return engine, info

    async def read_source(
        self, source: WeightsSource, root_hash: str | None, *, on_disk: bool
    ) -> Sink:
        """Return a sealed sink with the bytes of a source of files, which must have this root hash."""
        filling = self._begin_filling(root_hash, partial(StageSource.of, source), on_disk=on_disk)
        model = Path(self._loaded_engine()[1].model)
        return await filling.fill_from_files(locate_source(source, self._runtime.settings, model))

    async def read_pushed(
        self, active: ActiveWeights, given: TrainerTensors | None, *, on_disk: bool
    ) -> Sink:
        """Return a sealed sink with pushed bytes, from what is kept of them or from the trainer's tensors."""
        want, kept = active.root_hash, self._pushes.kept
        if given is not None and given.tensors:
            return await tensor_bytes.fill(self._begin_filling(want, None, on_disk=on_disk), given)
        if given is not None or kept is None:
            raise no_copy_error(active.identity, handed_over=given is not None)
        source = self._pushes.source_for_members(kept)
        return await fill_from_memory(self._begin_filling(want, source, on_disk=on_disk), kept)

    def _begin_filling(
        self, want: str | None, source: Callable[[], StageSource] | None, *, on_disk: bool
    ) -> SinkFilling:
        """Return how a sink is filled with this root hash; `source`: where the other nodes of a gang read."""
        engine, info = self._loaded_engine()
        elsewhere = fill_elsewhere(
            self._runtime.gang, source, want, REFILL_TIMEOUT_SECONDS, on_disk=on_disk
        )
        return SinkFilling(
            partial(engine.open_slot, on_disk=on_disk),
            info.layout,
            partial(_verify_refill, want),
            elsewhere=elsewhere,
            expected=want,
        )


def _verify_refill(want: str | None, root_hash: str) -> None:
    """Refuse a source that has changed since its weights were committed."""
    if root_hash != want:
        raise WeightsRejected(
            f"the source of the active weights has root_hash {root_hash}, they had {want}: its bytes were changed;"
            " commit a later version from an intact source"
        )
