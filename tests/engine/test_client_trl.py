"""TRL's GRPOTrainer over workers of this machine; what it needs besides the wheel in the development environment is verl's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.engine.engine_kinds import ROOT
from tests.support.engine.gangs import free_port_row

VERL = Path(os.environ.get("ROLLOUT_CACHE", ROOT / ".cache"), "env-verl")


def test_trl_learns_from_a_pool_that_gets_each_of_its_steps(tmp_path: Path) -> None:
    # dill copies modules whose path has no such folder, and fails with pyarrow's.
    packages = tmp_path / "site-packages"
    packages.symlink_to(VERL)
    path = os.pathsep.join((str(packages), str(ROOT / "src")))
    example = (ROOT / "examples" / "trl" / "count.py", "--steps", "5", "--replicas", "1")
    done = subprocess.run(
        [sys.executable, *example, "--port", str(free_port_row())],
        capture_output=True, text=True, timeout=200, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    rewards = [float(each) for each in re.findall(r"reward (\d\.\d+)", done.stdout)]
    assert len(rewards) == 5, done.stdout + done.stderr
    # Without new weights in the workers it stays at 0.1.
    assert rewards[0] < 0.13 < 0.2 < rewards[-1], rewards
