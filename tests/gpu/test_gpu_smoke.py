"""The engines on a real GPU, each through every check of `make gpu-smoke`; skipped where there is none."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from gpu_smoke import checks
from gpu_smoke.__main__ import VARIANTS, Row, main, run, table
from gpu_smoke.checks import CHECKS
from gpu_smoke.scene import MOE, NotHere, Plan, Scene, Wrong, gpu_mib
from rollout_worker.engine import ENGINES

QUICK = ["start", "outputs", "limits", "abort asleep"]
"""Checks that need no load."""


def missing() -> str | None:
    """Why there is no GPU here, None if there is one."""
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA GPU here: nvidia-smi is not installed"
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    return None if done.returncode == 0 else f"no NVIDIA GPU here: {done.stderr or done.stdout}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_on_a_gpu(engine: str, tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    plan = Plan(device="cuda", size="0.5b", out=tmp_path, idle_seconds=90)
    if plan.python(engine) is None:
        pytest.skip(f"{engine} is not installed in this environment")
    rows = list(run(plan, [engine], [*CHECKS, *VARIANTS]))
    assert "failed" not in {row.outcome for row in rows}, table(rows)


def test_the_checks_run_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [word for name in QUICK for word in ("--check", name)]
    status = main(["hf", "--device", "cpu", "--out", str(tmp_path), *chosen])
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert shown.count("| hf |") == len(QUICK)
    assert "64 greedy tokens right" in shown
    assert {"results.json", "hf"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("visible", "mib"), [(None, 0.0), ("", 0.0), ("3", 3.0), ("2,0", 2.0), ("GPU-5", 5.0)]
)
def test_the_memory_is_that_of_the_gpu_in_use(
    visible: str | None, mib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text("""#!/bin/sh\necho "$1" | sed 's/--id=//; s/GPU-//'\n""")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_mib() == mib


def scene_of(logprob: float) -> Any:
    """A worker whose every token has this logprob, of a model of two tokens, equally likely."""
    body = {"outputs": [{"token_ids": [0] * 8, "logprobs": [logprob] * 8}]}
    judge = SimpleNamespace(
        logits=lambda _, tokens: torch.zeros(len(tokens), 2),
        sampling_logprobs=lambda _, tokens, __: [-math.inf, *[-0.5] * (len(tokens) - 1)],
    )
    worker = SimpleNamespace(
        sample=lambda _: {"token_ids": [0] * 64},
        generate=lambda **_: httpx.Response(200, json=body),
    )
    models = SimpleNamespace(judge=lambda _: judge)
    return SimpleNamespace(models=models, worker=worker, version=0, exact=False, tolerance=0.25)


def test_logprobs_that_are_off_are_found_where_numbers_are_rounded_too() -> None:
    """One token lies beyond the edge of the judge's nucleus: its logprob there is that of nothing."""
    assert "top-p logprobs within 0.1 nats" in CHECKS["outputs"](scene_of(-0.6))
    with pytest.raises(Wrong, match=r"top-p 0.9 are up to 0.4 nats off"):
        CHECKS["outputs"](scene_of(-0.9))


def test_memory_that_two_processes_share(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_of(-0.6)
    scene.plan = SimpleNamespace(device="cpu")
    monkeypatch.setattr(checks, "SHARED_BYTES", 2 << 20)
    told = CHECKS["memory shared"](scene)
    assert re.fullmatch(r"2 MiB copied at [\d.]+ GB/s, and again after .* killed", told)


@pytest.mark.parametrize(("ranks", "right"), [(2, True), (1, False)])
def test_staged_weights_that_no_rank_holds_are_found(
    tmp_path: Path, ranks: int, *, right: bool
) -> None:
    told = f"staged weights of 1073741824 bytes are mapped by {ranks} of 2 ranks"
    (tmp_path / "worker.log").write_text(f'"{told}0"\n"{told}"\n')
    scene = scene_of(-0.6)
    scene.folder, scene.stage = tmp_path, lambda: None
    scene.held = lambda: Scene.held(scene)
    scene.kind = SimpleNamespace(in_process=False)
    scene.commit = lambda **_: {"pause_seconds": 0.5}
    if right:
        assert CHECKS["held ahead"](scene) == "2 ranks hold them, 2.0 GiB/s in the pause"
    else:
        with pytest.raises(Wrong, match="1 of 2 ranks hold"):
            CHECKS["held ahead"](scene)


@pytest.mark.parametrize(
    ("later", "wrong"),
    [
        ([([1, 2], [-0.1, -0.2]), ([3, 2], [-0.1, -0.2]), ([1, 2], [-0.1, -0.2])], None),
        ([([1, 2], [-0.1, -0.2])] * 3, "makes the same tokens"),
        ([([1, 2], [-0.1, -0.2]), ([3, 2], [-0.1, -0.2]), ([1, 2], [-0.1, -0.9])], "token 1"),
    ],
    ids=["right", "no update", "not the first any more"],
)
def test_a_version_that_does_not_come_back_is_found(
    later: list[tuple[list[int], list[float]]], wrong: str | None
) -> None:
    outputs = iter([{"token_ids": ids, "logprobs": logprobs} for ids, logprobs in later])
    scene: Any = SimpleNamespace(
        worker=SimpleNamespace(sample=lambda _: next(outputs)),
        update=lambda **_: {"pause_seconds": 0.5},
        version_tensors=1000,
    )
    if wrong is None:
        told = CHECKS["there and back"](scene)
        assert told == "pause 500 ms, 500 us for each of 1000 tensors"
    else:
        with pytest.raises(Wrong, match=wrong):
            CHECKS["there and back"](scene)


def test_a_variant_that_cannot_be_tried_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(device="cuda", size="0.5b", out=tmp_path, idle_seconds=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(NotHere, match="needs 2 GPUs, here is 1"):
        VARIANTS["two GPUs"].planned(plan, "two GPUs", "vllm")
    with pytest.raises(NotHere, match="hf can't"):
        VARIANTS[MOE].planned(plan, MOE, "hf")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    own, _ = VARIANTS["two GPUs"].planned(plan, "two GPUs", "sglang")
    assert own.extra == ("--engine-arg=--tp-size=2",)
    assert own.size == "0.5b"
    assert {name for each in VARIANTS.values() for name in each.checks} <= set(CHECKS)


def test_a_failure_is_told_in_the_table() -> None:
    rows = [
        Row("hf", "start", "passed", "Ready", 3.2),
        Row("hf", "sleep", "failed", "asleep at level 1\nit holds 9,000 MiB", 1.0),
    ]
    assert table(rows).splitlines()[2:] == [
        "| hf | start | ok | 3 | Ready |",
        "| hf | sleep | FAILED | 1 | asleep at level 1 it holds 9,000 MiB |",
    ]
