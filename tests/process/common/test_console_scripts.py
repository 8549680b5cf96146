"""Ctrl-C ends a command quietly, whenever it comes."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
START = """
import signal
from rollout_common.console_scripts import run_script
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
run_script('slow_command')
"""
WAIT = "print('here', flush=True); time.sleep(60)"
SLOW = {
    "as it imports": f"import time\n{WAIT}\n",
    "where an import swallows errors": f"import time\ntry:\n    {WAIT}\nexcept BaseException: pass\n",
    "as it runs": f"import time\ndef main():\n    {WAIT}\n",
}


@pytest.mark.parametrize("moment", SLOW)
def test_ctrl_c_is_quiet_at_every_moment(tmp_path: Path, moment: str) -> None:
    (tmp_path / "slow_command.py").write_text(SLOW[moment])
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    with subprocess.Popen(
        [sys.executable, "-c", START],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as command:  # fmt: skip
        assert command.stdout is not None
        assert command.stdout.readline() == "here\n"
        command.send_signal(signal.SIGINT)
        assert command.communicate(timeout=10) == ("", "")
    assert command.returncode == 130


def test_every_command_starts_so_and_finds_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    home = importlib.import_module("rollout_common.console_scripts")
    found: list[object] = []

    def note(module: str, function: str = "main") -> None:
        found.append(getattr(importlib.import_module(module), function))

    monkeypatch.setattr(home, "run_script", note)
    for start in scripts.values():
        module, _, function = start.partition(":")
        assert module == home.__name__
        getattr(home, function)()
    assert len(found) == len(scripts)
    assert all(map(callable, found))
