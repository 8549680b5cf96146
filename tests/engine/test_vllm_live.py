"""What only vLLM can get wrong, on a model of 120 MB; everything else is in tests/contract."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from engine_kinds import KINDS, ROOT, left_out
from processes import Process, descendants, shares_lock
from reference import Reference
from rollout_worker.turn import Turn, TurnTimeout
from tinymodels import script
from waiting import until_sync
from workers import PROMPT, Command, slug

KIND = KINDS["vllm"]
SHAPE = {"hidden": 512, "intermediate": 1024, "layers": 4, "heads": 8, "vocab": 32768}
WEIGHTS_MB = 105
GPU = "gpu-0"

pytestmark = pytest.mark.skipif(left_out(KIND) is not None, reason=str(left_out(KIND)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with a tied output head, another version of it, and one that can't be served."""
    home = tmp_path_factory.mktemp("vllm-models")
    maker = script()
    maker.make_model(home / "one", 1, maker.Shape(**SHAPE))
    maker.make_weights(home / "two", 2, maker.Shape(**SHAPE))
    maker.make_model(home / "narrow", 1, maker.Shape(hidden=64, heads=4))
    return {folder.name: folder for folder in home.iterdir()}


@pytest.fixture(scope="module")
def locks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lock directory of the worker."""
    return tmp_path_factory.mktemp("vllm-turn")


@pytest.fixture(scope="module")
def worker(
    models: dict[str, Path], locks: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Command]:
    turn = ("--turn-directory", str(locks), "--turn-devices", GPU)
    with served(models["one"], tmp_path_factory.mktemp("vllm-worker"), *turn) as worker:
        yield worker


@contextmanager
def served(model: Path, home: Path, *flags: str) -> Iterator[Command]:
    flags = ("--engine", "vllm", "--max-length", "512", "--shutdown-grace", "0", *flags)
    env = {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    worker = Command(model, home / "worker.log", flags, env, python=KIND.python)
    try:
        up = ("Active", "Failed")
        until_sync(lambda: worker.state()["lifecycle"] in up, KIND.start_seconds, what="the engine")
        assert not worker.state()["last_error"]
        yield worker
    finally:
        worker.terminate()
        worker.process.wait(60)
        worker.close()


def test_an_update_reaches_a_tied_output_head(worker: Command, models: dict[str, Path]) -> None:
    """vLLM 0.32 keeps the old packed copy of a tied head on CPUs: `extension._repack_heads`."""
    before = worker.sample(12)["token_ids"]
    worker.update(1, 1, models["two"])
    after = worker.sample(12)["token_ids"]
    assert before == Reference(models["one"]).greedy(PROMPT, 12)
    assert after == Reference(models["two"]).greedy(PROMPT, 12)


def resident_mb(worker: Command) -> float:
    """Memory of vLLM's worker process."""
    pages = (Path("/proc") / str(ranks(worker).pid) / "statm").read_text().split()
    return int(pages[1]) * 4096 / 2**20


def ranks(worker: Command) -> Process:
    """The process that holds the model."""
    (found,) = (p for p in descendants(worker.process.pid) if "VLLM::Worker" in p.command)
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_waking_brings_all_of_it(worker: Command, level: int) -> None:
    before, awake = worker.sample(12)["token_ids"], resident_mb(worker)
    slept: httpx.Response = worker.post("sleep", level=level)
    assert slept.status_code == 200, slept.text
    asleep = resident_mb(worker)
    woken = worker.post("wake")
    assert woken.status_code == 200, woken.text
    # The embedding, the packed layers and the packed head: more than the checkpoint holds.
    assert awake - asleep > WEIGHTS_MB, (awake, asleep)
    assert worker.sample(12)["token_ids"] == before


def test_a_head_size_that_vllm_has_no_kernel_for_is_refused_before_the_start(
    models: dict[str, Path],
) -> None:
    """It would start healthy and die at the first request."""
    code = """
import json, sys
from pathlib import Path
from rollout_worker.engine import EngineError
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.vllm import environment, launch, settings
environment.prepare_environment()
try:
    options = EngineOptions(model=Path(sys.argv[1]))
    launch.launch(options, settings.parse(()), lambda _: None, lambda: False)
except EngineError as error:
    print(json.dumps(str(error)))
"""
    found = subprocess.run(
        [KIND.python, "-c", code, models["narrow"]],
        env={"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=sys.stderr,
        timeout=240,
        check=True,
    )
    reason = json.loads(found.stdout.splitlines()[-1])
    assert "head_dim 16" in reason
    assert "hf engine" in reason


@pytest.mark.soak
def test_what_vllm_alone_refuses_ends_that_request_only(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """With drafts it takes no bias, which no check of ours knows."""
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    flag = f"--engine-arg=--speculative-config={json.dumps(drafts)}"
    with served(models["one"], tmp_path, flag) as worker:
        running = worker.long(sampling={"max_tokens": 400, "ignore_eos": True})
        answer = worker.generate(sampling={"logit_bias": {"5": 1}})
        assert (answer.status_code, slug(answer)) == (422, "unsupported")
        assert "speculative" in answer.json()["detail"]
        assert running.result(60).json()["outputs"][0]["stop_reason"] == "length"
        assert worker.state()["restarts"] == 0


def test_the_turn_outlives_a_killed_worker_as_long_as_its_engine(
    worker: Command, locks: Path
) -> None:
    """The last one here, for it ends the worker that the others share."""
    trainer = Turn(locks, [GPU], "trainer-0")
    model = ranks(worker)
    assert shares_lock(model.pid, locks / GPU)
    assert worker.post("sleep").json()["turn"]["state"] == "Released"
    assert not shares_lock(model.pid, locks / GPU)
    assert worker.post("wake").json()["turn"]["state"] == "Held"
    assert shares_lock(model.pid, locks / GPU)
    # Stopped, it can't follow its parent.
    os.kill(model.pid, signal.SIGSTOP)
    try:
        worker.process.kill()
        worker.process.wait(30)
        with pytest.raises(TurnTimeout):
            trainer.take(1)
    finally:
        os.kill(model.pid, signal.SIGCONT)
    trainer.take(30)
    until_sync(lambda: not model.alive, 30, what="the end of the stopped one")
