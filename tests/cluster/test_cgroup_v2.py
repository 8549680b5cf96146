"""Local nodes where only cgroup v2 is mounted: a Debian 12 in a virtual machine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from localkube.home import REPOSITORY

logger = logging.getLogger(__name__)

MINUTES = 40


# Every day test_local_cluster.py makes nodes with the cgroups of this machine.
@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_local_nodes_need_no_cgroup_v1() -> None:
    folder = REPOSITORY / "hack/vm"
    inside = ["python3", str(folder / "check.py")]
    command = [sys.executable, str(folder / "machine.py"), f"--minutes={MINUTES}", *inside]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    logger.info("%s", done.stdout)
    assert done.returncode == 0, done.stdout
    assert "cgroup v2: all is well" in done.stdout
