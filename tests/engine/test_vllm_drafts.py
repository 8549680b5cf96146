"""Commits to a target that shares modules with its draft, by vLLM's own loads; no vLLM is started."""

from __future__ import annotations

from pathlib import Path

from tests.support.engine import vllm_drafts
from tests.support.engine.engine_programs import EnginePrograms


def test_a_draft_that_shares_the_targets_embedding_leaves_it_the_targets(
    vllm_programs: EnginePrograms,
) -> None:
    found = vllm_programs.read_answer(Path(vllm_drafts.__file__))
    assert found == {"loaded": [7, 3], "without": [8, 3], "repeated": [9, 4]}
