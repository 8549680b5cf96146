"""Commits of vLLM by recorded copies make the weights that its own loaders make; drafts that share modules with their target; models that load past vLLM's loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.engine import vllm_drafts, vllm_loads, vllm_writes
from tests.support.engine.engine_programs import EnginePrograms
from tests.support.engine.tinymodels import script


def test_copies_make_the_weights_that_vllms_loaders_make(
    tmp_path: Path, vllm_programs: EnginePrograms
) -> None:
    """Of a mixture; a tied head is the contract suite's model's."""
    shape: dict[str, Any] = {"tied": False, "experts": 16, "hidden": 64, "intermediate": 32}
    shape |= {"heads": 2, "dtype": "bfloat16"}
    maker = script()
    one, two = tmp_path / "one", tmp_path / "two"
    maker.make_model(one, 1, maker.Shape(**shape))
    maker.make_weights(two, 2, maker.Shape(**shape))
    program = Path(vllm_loads.__file__)
    found = vllm_programs.read_answer(program, one, two, 1, **vllm_loads.ENVIRON)
    outputs = found["outputs"]
    assert outputs["first own"] == outputs["first recorded"] == outputs["first copies"]
    assert outputs["first own"] == outputs["first ring"]
    assert outputs["second own"] == outputs["second copies"] == outputs["second ring"]
    assert outputs["first own"] != outputs["second own"]
    assert found["layers"] > found["in_place"] > 0, "some are packed, norms are not"


def test_a_draft_that_shares_the_targets_embedding_leaves_it_the_targets(
    vllm_programs: EnginePrograms,
) -> None:
    found = vllm_programs.read_answer(Path(vllm_drafts.__file__))
    assert found == {"loaded": [7, 3], "without": [8, 3], "repeated": [9, 4]}


def test_a_model_that_copies_into_its_parameters_itself_gets_every_commit(
    vllm_programs: EnginePrograms,
) -> None:
    found = vllm_programs.read_answer(Path(vllm_writes.__file__))
    refused = found.pop("refused")
    assert found == {
        "recorded": [10.0, 11.0, 12.0, 13.0],
        "planned": True,
        "repeated": [20.0, 21.0, 22.0, 23.0],
        "vllm's own": [30.0, 31.0, 32.0, 33.0],
        "with scales": [35.0, 36.0, 37.0, 38.0],
        "repeated with scales": False,
    }
    assert "can't update w13_weight" in refused
