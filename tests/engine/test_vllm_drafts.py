"""Commits to a target that shares modules with its draft, by vLLM's own loads; no vLLM is started."""

from __future__ import annotations

import pytest

from tests.support.engine import vllm_drafts
from tests.support.engine.engine_kinds import KINDS, ROOT, left_out, read_program_answer

KIND = KINDS["vllm"]

pytestmark = pytest.mark.skipif(left_out(KIND) is not None, reason=str(left_out(KIND)))


def test_a_draft_that_shares_the_targets_embedding_leaves_it_the_targets() -> None:
    program = (KIND.python, vllm_drafts.__file__)
    found = read_program_answer(program, PYTHONPATH=f"{ROOT / 'src'}:{ROOT}")
    assert found == {"loaded": [7, 3], "without": [8, 3], "repeated": [9, 4]}
