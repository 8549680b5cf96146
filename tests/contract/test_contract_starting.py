"""Model folders that can't be served: every engine names the file and the fix in the same words."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.broken_models import DAMAGE, damage
from tests.support.engine.engine_kinds import ROOT, EngineKind, kinds
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import Command
from tests.support.waiting import until_sync

DAILY = [
    pytest.param(kind, marks=[pytest.mark.soak] if kind.name == "sglang" else [])
    for kind in kinds()
]
"""SGLang's adapter reads the folder before it starts anything, which tests/unit/worker/engines/test_worker_sglang_parts.py shows."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", DAILY, indirect=True, ids=str)
def test_a_broken_model_folder_is_told_and_tried_again(
    kind: EngineKind, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """One worker: it looks again at each restart, so that a mended folder is all that it takes."""
    whole, folder = tiny_models.model(1), tmp_path / "model"
    shutil.copytree(whole, folder)
    (folder / "config.json").unlink()
    flags = ["--engine", kind.name, "--shutdown-grace", "0", "--restart-delays", "0.2"]
    env = {"PYTHONPATH": str(ROOT / "src"), **kind.env}
    worker = Command(folder, tmp_path / "log", flags, env, python=kind.python)
    try:
        for name, text, said in DAMAGE:
            for part in ("config.json", "generation_config.json"):
                shutil.copy(whole / part, folder / part)
            damage(folder, name, text)

            def told(said: str = said) -> bool:
                return re.search(said, worker.state()["last_error"] or "") is not None

            until_sync(told, kind.start_seconds, what=f"the worker to say {said}")
            assert worker.data.get("/health").status_code == 200
            assert worker.data.get("/ready").status_code == 503
    finally:
        worker.close()
        worker.process.kill()
        worker.process.wait(30)
