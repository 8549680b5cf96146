"""Commits of vLLM by recorded copies: the same weights as by vLLM's own loaders, in a fraction of the calls."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import vllm_loads
from tests.support.engine.engine_kinds import KINDS, ROOT, left_out
from tests.support.engine.tinymodels import script

KIND = KINDS["vllm"]

pytestmark = pytest.mark.skipif(left_out(KIND) is not None, reason=str(left_out(KIND)))


def loads(folder: Path, **shape: Any) -> dict[str, Any]:
    """Run the program on two versions of a model of this shape."""
    maker = script()
    maker.make_model(folder / "one", 1, maker.Shape(**shape))
    maker.make_weights(folder / "two", 2, maker.Shape(**shape))
    program = [str(KIND.python), vllm_loads.__file__, str(folder / "one"), str(folder / "two"), "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "shape",
    [
        {"tied": True, "dtype": "float32"},
        {
            "tied": False,
            "experts": 16,
            "hidden": 64,
            "intermediate": 32,
            "heads": 2,
            "dtype": "bfloat16",
        },
    ],
    ids=["a tied head", "experts"],
)
def test_copies_make_the_weights_that_vllms_loaders_make(
    shape: dict[str, Any], tmp_path: Path
) -> None:
    found = loads(tmp_path, **shape)
    outputs = found["outputs"]
    assert outputs["first own"] == outputs["first recorded"] == outputs["first copies"]
    assert outputs["first own"] == outputs["first ring"]
    assert outputs["second own"] == outputs["second copies"] == outputs["second ring"]
    assert outputs["first own"] != outputs["second own"]
    assert found["layers"] > found["in_place"] > 0, "some are packed, norms are not"
