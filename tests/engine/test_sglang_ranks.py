"""A real SGLang of two tensor-parallel ranks, as `spec.parallelism` asks for one."""

from __future__ import annotations

import pytest

from rollout_worker.engines.sglang.sglang_engine import SglangEngine
from tests.support.engine.engine_kinds import KINDS
from tests.support.engine.engines import (
    PROMPT,
    TWO_RANKS_ON_A_CPU,
    V1,
    nothing,
    request,
    run,
    sglang_options,
    update,
)
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels

PYTHON = KINDS["sglang"].python


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_two_ranks_make_the_tokens_of_one(
    tiny_models: TinyModels,
    reference: Reference,
    reference_2: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in TWO_RANKS_ON_A_CPU.items():
        monkeypatch.setenv(name, value)
    engine = SglangEngine(sglang_options(tiny_models.model(1), python=PYTHON))
    try:
        await engine.start(lambda _: None)
        assert engine._parts is not None
        assert engine._parts.versions._facts["ranks"] == 2
        before = await run(engine, request("before", max_tokens=24))
        assert before.token_ids == reference.greedy(PROMPT, 24)
        await update(engine, tiny_models.weights(2), V1, "recompute")
        after = await run(engine, request("after", max_tokens=24))
        assert after.token_ids == reference_2.greedy(PROMPT, 24)
        await engine.pause()
        await engine.sleep(1, ("weights", "kv_cache"), nothing)
        await engine.wake(("weights", "kv_cache"), nothing)
        await engine.resume()
        awake = await run(engine, request("awake", max_tokens=24))
        assert awake.token_ids == after.token_ids
    finally:
        await engine.stop()
