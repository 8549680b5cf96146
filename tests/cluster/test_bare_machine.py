"""Debian 12 in virtual machines: local nodes where only cgroup v2 is mounted, a newcomer who follows README, two nodes."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys

import pytest

from localkube.home import REPOSITORY, cache

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.timeout(140 * 60),
]
"""The longest program's own deadline and the time to make its disk, without hardware virtualization."""


def run_program(program: str, minutes: int, *flags: str) -> str:
    """Return what a program of hack/vm prints here."""
    path = str(REPOSITORY / "hack/vm" / program)
    done = subprocess.run(
        [sys.executable, path, f"--minutes={minutes}", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        cwd=REPOSITORY,
    )
    logger.info("%s", done.stdout)
    assert done.returncode == 0, done.stdout
    return done.stdout


# Every day test_local_cluster.py makes nodes with the cgroups of this machine.
def test_local_nodes_need_no_cgroup_v1() -> None:
    shown = run_program("machine.py", 40, "python3", "hack/vm/cgroups.py")
    assert "cgroup v2: all is well" in shown


# It has no network: its images are those that `make prepared` has built.
def test_the_demo_tells_its_story_on_cgroup_v2() -> None:
    python = str(cache() / "venv/bin/python")
    command = ["env", "PYTHONPATH=hack:hack/cluster", python, "-m", "demo"]
    shown = run_program("machine.py", 100, *command)
    assert "A pod is killed and replaced; it serves only once it has the weights" in shown


# Every day test_local_pool.py runs the same commands here; README's packages are 3 GB.
def test_a_newcomer_gets_tokens_by_readmes_words_alone() -> None:
    shown = run_program("machine.py", 120, "--bare", "python3", "hack/vm/readme.py")
    [seconds] = re.findall(r"first tokens after (\d+) s", shown)
    assert int(seconds) <= 60, "with a model that is there"
    rewards = [float(each) for each in re.findall(r"reward (\d\.\d+)", shown)]
    assert rewards[-1] > 0.8, rewards


# Every day test_transfer_faults.py cuts connections and stops processes here.
def test_weights_cross_a_network_and_a_machine_may_lose_its_power() -> None:
    assert "two machines: all is well" in run_program("two_nodes.py", 60)
