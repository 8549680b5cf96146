"""Install a wheel into a clean environment and import what users import.

python hack/check_wheel.py dist/rollout_operator-….whl
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import importlib.resources as r
import operator, sys
operator.add  # the standard library's, not a folder of ours
import rollout_client, rollout_client.worker_control, rollout_worker.schemas
import rollout_operator.core.pass_planning, rollout_operator.operator_process
assert (r.files("rollout_operator") / "crd.yaml").is_file(), "the CRD is not in the wheel"
import rollout_client.commands.cause_finding
assert rollout_client.commands.cause_finding.runbook_words()["causes"], "fixes.json is not in the wheel"
assert "torch" not in sys.modules, "the operator pulled in torch"
import importlib.util as u
assert u.find_spec("torch") is None, "the extra [operator] installs torch"
print("imports:", rollout_operator.operator_process.__file__)
"""

# Only processes that send or receive weights need numpy: neither the operator nor its image has it.
DELTAS = """
from rollout_common.transfer import delta_native as native
from rollout_common.transfer import delta_words as vectors
from rollout_common.transfer.delta import WAY, apply_delta, encode_delta
assert native.LIBRARY is not None, "the wheel lacks libdelta.so, or it can't be loaded here"
base, new = bytes(300_001), b"n" * 3 + bytes(299_998)
memory = bytearray(base)
apply_delta(encode_delta(base, new), memoryview(memory))
assert memory == new and encode_delta(base, new) == vectors.encode_words(base, new, None)
print("deltas by", WAY)
"""


PINS = "requirements/dev.txt"


def run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=600, stdout=subprocess.DEVNULL)


def main(wheel: str) -> None:
    uv = Path(os.environ.get("ROLLOUT_CACHE", ".cache")) / "boot" / "uv"
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/venv/bin/python"
        run(str(uv), "venv", "--quiet", "--python", sys.executable, f"{folder}/venv")
        pins = ("--python", python, "--require-hashes", "-r", "requirements/operator.txt")
        run(str(uv), "pip", "install", "--quiet", *pins)
        run(str(uv), "pip", "install", "--quiet", "--no-deps", "--python", python, wheel)
        subprocess.run([python, "-c", PROGRAM], check=True, cwd="/", timeout=120)
        run(str(uv), "pip", "install", "--quiet", "--python", python, "-c", PINS, "numpy")
        subprocess.run([python, "-c", DELTAS], check=True, cwd="/", timeout=120)
        for command in ("rollout-operator", "rollout-worker"):
            run(f"{folder}/venv/bin/{command}", "--help")


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()))
