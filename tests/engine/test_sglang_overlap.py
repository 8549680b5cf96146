"""SGLang with steps that overlap, as on a GPU; the CPU adapter switches that off."""

from __future__ import annotations

import asyncio
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_worker.engines.sglang.sglang_engine import SglangEngine
from tests.support.engine.engine_kinds import KINDS
from tests.support.engine.engines import (
    PROMPT,
    V1,
    Output,
    flip,
    follow,
    reaches,
    request,
    sglang_options,
    staged,
)
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels

PYTHON = KINDS["sglang"].python
OVERLAPPING = """#!/bin/bash
for word; do [ "$word" = --disable-overlap-schedule ] || words+=("$word"); done
exec {} "${{words[@]}}"
"""
ROWS = 4

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        "sglang" not in os.environ.get("ROLLOUT_ENGINES", "sglang"),
        reason="ROLLOUT_ENGINES leaves sglang out",
    ),
]


async def test_a_pause_between_overlapping_steps_labels_every_token_right(
    tiny_models: TinyModels, reference: Reference, reference_2: Reference, tmp_path: Path
) -> None:
    """The step under way when SGLang is told to rest gives each output one more token."""
    python = tmp_path / "python"
    python.write_text(OVERLAPPING.format(shlex.quote(str(PYTHON))))
    python.chmod(0o755)
    engine = SglangEngine(sglang_options(tiny_models.model(1), python=python))
    try:
        await engine.start(lambda _: None)
        assert engine.capabilities.in_flight == ("Drain", "Abort", "Recompute")
        outputs = [Output() for _ in range(ROWS)]
        asked = [replace(request(f"r{n}", max_tokens=160), streamed=n == 0) for n in range(ROWS)]
        version = await staged(engine, tiny_models.weights(2))
        running = [
            asyncio.create_task(follow(engine, each, output))
            for each, output in zip(asked, outputs, strict=True)
        ]
        await asyncio.gather(*(reaches(output, 20) for output in outputs))
        await flip(engine, version.sink, V1, "recompute")
        await asyncio.gather(*running)
    finally:
        await engine.stop()
    for output in outputs:
        assert set(output.versions) == {(0, False), (1, False)}
        turn = output.versions.index((1, False))
        old = reference.logits(PROMPT, output.token_ids).argmax(-1).tolist()
        new = reference_2.logits(PROMPT, output.token_ids).argmax(-1).tolist()
        assert output.token_ids == [*old[:turn], *new[turn:]]
