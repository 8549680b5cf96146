"""An SGLang that can't update its model, in ways of its own: told at the start, or before anything is staged.

A GPU's packed layers are not to be had here, so its processes are given what those would do.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_worker.engine import EngineError, WeightsRejected
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.sglang.sglang_engine import SglangEngine
from rollout_worker.sources.checkpoint_files import open_source
from tests.support.engine.engine_kinds import KINDS, left_out
from tests.support.engine.engines import request, run
from tests.support.engine.sglang_faults import write_fault
from tests.support.engine.tinymodels import TinyModels

KIND = KINDS["sglang"]
REFUSES = """
def change(updater):
    updater._unsupported_derived_weight_cache_error = lambda model=None: "a derived cache is in use"
"""
SPOILS = """
def change(updater):
    def end(self, *, run_post_load):
        import torch
        for name, parameter in self.get_model().named_parameters():
            if name.endswith("o_proj.weight"):
                parameter.data.mul_(4)  # as scales that are packed no more
    updater.WeightUpdater.end_weight_update = end
"""

pytestmark = pytest.mark.skipif(left_out(KIND) is not None, reason=str(left_out(KIND)))


@pytest.fixture
def engine(
    request: pytest.FixtureRequest,
    tiny_models: TinyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> SglangEngine:
    """Not started, with processes that have the fault."""
    fault, flags = request.param
    write_fault(tmp_path, fault, monkeypatch)
    args = ("--python", str(KIND.python), *flags)
    model = tiny_models.model(1)
    return SglangEngine(
        EngineOptions(model, device="cpu", dtype="float32", max_length=64, args=args)
    )


# A start of its own: tests/engine/test_sglang_engine.py asks one that serves every day.
@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", [(REFUSES, ("--self-update-check=off",))], indirect=True)
async def test_an_update_that_sglang_refuses_is_refused_before_it_is_staged_and_kills_nothing(
    engine: SglangEngine, tiny_models: TinyModels
) -> None:
    try:
        await engine.start(lambda _: None)
        with pytest.raises(WeightsRejected, match="a derived cache is in use"):
            await engine.open_slot(open_source(tiny_models.weights(2)).entries)
        assert engine.alive() is None
        assert len((await run(engine, request(max_tokens=4))).token_ids) == 4
    finally:
        await engine.stop()


# A start each: what is made of it is tried every day by tests/unit/worker/engines/test_worker_selfcheck.py.
@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ((REFUSES, ()), "a derived cache is in use"),
        ((SPOILS, ()), r"changes its outputs: .* output 0"),
    ],
    indirect=["engine"],
    ids=["refuses", "spoils"],
)
async def test_a_model_that_it_updates_wrongly_is_refused_at_the_start(
    engine: SglangEngine, why: str
) -> None:
    try:
        with pytest.raises(EngineError, match=rf"can't update this model's weights \(.*{why}"):
            await engine.start(lambda _: None)
    finally:
        await engine.stop()
