"""A worker inside this process with the hf engine: weights handed over as this process's own tensors."""

from __future__ import annotations

import gc
import itertools
import runpy
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rollout_worker.embedded import HandOverFailed, ProblemError, Worker
from rollout_worker.lifecycle import governor
from rollout_worker.sources.checkpoint_files import write_manifest
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT, Client, slug
from tests.support.waiting import until_sync

ALONE: dict[str, Any] = {
    "auth": "none",
    "control_host": "127.0.0.1",
    "data_host": "127.0.0.1",
    "data_port": 0,
    "control_port": 0,
}


def client_of(worker: Worker) -> Client:
    return Client(*worker._host.ports)


def parameters_of(worker: Worker) -> dict[str, torch.Tensor]:
    """The tensors that the engine computes with, by their checkpoint's names."""
    service = worker._host.worker
    assert service is not None
    engine: Any = service.runtime.engine
    return dict(engine._parts.memory._targets)


def trainer_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def worker(tiny_models: TinyModels) -> Iterator[Worker]:
    transformers_logging.enable_progress_bar()  # as a trainer may have it
    with Worker(model=tiny_models.model(1), **ALONE) as worker:
        yield worker


def test_the_trainers_progress_bars_are_left_alone(worker: Worker) -> None:
    assert transformers_logging.is_progress_bar_enabled()


@pytest.fixture
def client(worker: Worker) -> Iterator[Client]:
    client = client_of(worker)
    yield client
    client.close()


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(governor, "TRANSITION_RETRY_SECONDS", 0.2)


VERSIONS = itertools.count(10, 10)


@pytest.fixture
def version() -> int:
    """Above all that were handed over."""
    return next(VERSIONS)


def test_handed_over_tensors_serve_as_they_are(
    worker: Worker, client: Client, version: int, tiny_models: TinyModels, reference_2: Reference
) -> None:
    model = trainer_model(tiny_models.weights(2))
    done = worker.hand_over(version, model, labels={"step": "7"})
    assert done.committed
    assert done.root_hash == write_manifest(tiny_models.weights(2))
    mine = dict(model.named_parameters())
    for name, tensor in parameters_of(worker).items():
        assert tensor.data_ptr() == mine[name].data_ptr(), name
    output = client.sample(12)
    assert output["token_ids"] == reference_2.greedy(PROMPT, 12)
    assert output["weights"] == [
        {"epoch": 0, "version": version, "start": 0, "end": 12, "stale_kv": False}
    ]
    active = worker.state().weights.active
    assert active is not None
    assert active.labels == {"step": "7"}


def test_copies_leave_the_trainer_free_to_step(
    worker: Worker, client: Client, version: int, tiny_models: TinyModels, reference_2: Reference
) -> None:
    model = trainer_model(tiny_models.weights(2))
    worker.hand_over(version, model.state_dict(), copy=True)
    mine = {tensor.data_ptr() for tensor in model.parameters()}
    assert mine.isdisjoint(tensor.data_ptr() for tensor in parameters_of(worker).values())
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
    assert client.sample(8)["token_ids"] == reference_2.greedy(PROMPT, 8)


def test_what_has_gaps_is_copied_and_has_the_hash_of_its_values(
    worker: Worker, client: Client, version: int, tiny_models: TinyModels, reference_2: Reference
) -> None:
    tensors = load_file(tiny_models.weights(2) / "model.safetensors")
    gaps = {
        name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
        for name, tensor in tensors.items()
    }
    done = worker.hand_over(version, gaps.items())
    assert done.root_hash == write_manifest(tiny_models.weights(2))
    assert client.sample(8)["token_ids"] == reference_2.greedy(PROMPT, 8)


@pytest.mark.usefixtures("quick_retries")
def test_a_paused_worker_does_not_resume_with_changed_tensors(
    worker: Worker, client: Client, version: int, tiny_models: TinyModels
) -> None:
    model = trainer_model(tiny_models.weights(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker.hand_over(version, model)
    worker.pause()
    for tensor in model.parameters():
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    with pytest.raises(ProblemError, match="was changed in place after it was handed over"):
        worker.resume()
    assert worker.state().lifecycle == "Paused"
    worker.hand_over(version + 1, model)
    worker.resume()
    output = client.sample(8)
    assert {span["version"] for span in output["weights"]} == {version + 1}
    model.eval()
    with torch.no_grad():
        first = int(model(torch.tensor([PROMPT])).logits[0, -1].argmax())
    assert output["token_ids"][0] == first


def test_tensors_changed_while_they_serve_make_no_token(
    worker: Worker, client: Client, version: int, tiny_models: TinyModels
) -> None:
    model = trainer_model(tiny_models.weights(2))
    worker.hand_over(version, model)
    restarts = worker.state().restarts
    answer = client.long()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(0.5)
    output = answer.result(60).json()["outputs"][0]
    assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "engine")
    until_sync(lambda: worker.state().restarts > restarts, 60, what="the engine's restart")
    until_sync(lambda: worker.state().lifecycle == "Active", 60, what="the next engine")
    assert "its bytes were changed" in str(worker.state().last_error)
    assert slug(client.generate()) == "fenced"  # what was promised serves no more
    worker.hand_over(version + 1, model)
    assert client.sample(4)["weights"][0]["version"] == version + 1


def test_a_hand_over_lets_running_requests_finish(
    worker: Worker, client: Client, version: int, tiny_models: TinyModels
) -> None:
    first, second = (trainer_model(tiny_models.weights(seed)) for seed in (2, 3))
    worker.hand_over(version, first)
    before = client.long("drained", sampling={"max_tokens": 60, "ignore_eos": True})
    worker.hand_over(version + 1, second)
    output = before.result(60).json()["outputs"][0]
    assert output["stop_reason"] == "length"
    assert [span["version"] for span in output["weights"]] == [version]
    cut = client.long("cut")
    worker.hand_over(version + 2, first, drain_seconds=0)
    output = cut.result(60).json()["outputs"][0]
    assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "weights")
    assert [span["version"] for span in output["weights"]] == [version + 1]


def test_other_tensors_than_the_models_are_refused_by_name(
    worker: Worker, version: int, tiny_models: TinyModels
) -> None:
    tensors = load_file(tiny_models.weights(2) / "model.safetensors")
    name = sorted(tensors)[0]
    half = {**tensors, name: tensors[name].half()}
    with pytest.raises(HandOverFailed, match=rf"{name}.* wrong dtype: it is F16"):
        worker.hand_over(version, half)
    del half[name]
    with pytest.raises(HandOverFailed, match=f"{name}.* is missing in 'what was handed over'"):
        worker.hand_over(version, half)
    with pytest.raises(Exception, match=f"{name}.* is handed over twice"):
        worker.hand_over(version, [*tensors.items(), (name, tensors[name])])
    with pytest.raises(Exception, match=f"{name}.* is a list: hand over torch tensors"):
        worker.hand_over(version, {**tensors, name: [1.0]})
    active = worker.state().weights.active
    assert active is not None
    assert active.version < version


def test_the_engine_of_this_process_may_die(
    worker: Worker, client: Client, version: int, tiny_models: TinyModels, reference_2: Reference
) -> None:
    """Tensors that nobody changed serve again; the trainer's code goes on."""
    model = trainer_model(tiny_models.weights(2))
    worker.hand_over(version, model)
    service = worker._host.worker
    assert service is not None
    restarts = worker.state().restarts
    engine: Any = service.runtime.engine
    engine._parts.thread.run_command(lambda: 1 / 0)
    until_sync(lambda: worker.state().restarts > restarts, 60, what="the engine's restart")
    until_sync(client.ready, 60, what="the worker to serve")
    output = client.sample(8)
    assert output["weights"][0]["version"] == version
    assert output["token_ids"] == reference_2.greedy(PROMPT, 8)
    mine = {tensor.data_ptr() for tensor in model.parameters()}
    assert mine.issuperset(tensor.data_ptr() for tensor in parameters_of(worker).values())


def test_asleep_the_worker_holds_nothing_and_wakes_with_what_is_handed_over(
    worker: Worker, client: Client, version: int, tiny_models: TinyModels, reference_2: Reference
) -> None:
    model = trainer_model(tiny_models.weights(3))
    worker.hand_over(version, model)
    seen = [weakref.ref(tensor) for tensor in model.parameters()]
    with worker.turn():
        state = worker.state()
        assert (state.lifecycle, state.resident.weights, state.resident.kv_cache) == (
            "Asleep",
            False,
            False,
        )
        assert all(tensor.numel() == 0 for tensor in parameters_of(worker).values())
        del model
        gc.collect()
        assert [ref() for ref in seen if ref() is not None] == []
        model = trainer_model(tiny_models.weights(2))
        worker.hand_over(version + 1, model)
        assert slug(client.generate()) == "asleep"
    output = client.sample(8)
    assert output["token_ids"] == reference_2.greedy(PROMPT, 8)
    assert {span["version"] for span in output["weights"]} == {version + 1}
    mine = {tensor.data_ptr() for tensor in model.parameters()}
    assert mine.issuperset(tensor.data_ptr() for tensor in parameters_of(worker).values())


@pytest.mark.usefixtures("quick_retries")
def test_a_turn_without_a_hand_over_does_not_wake(
    worker: Worker, client: Client, version: int, tiny_models: TinyModels
) -> None:
    worker.hand_over(version, trainer_model(tiny_models.weights(2)))
    with pytest.raises(ProblemError, match="hand over"), worker.turn():
        pass
    until_sync(lambda: worker.state().lifecycle == "Asleep", what="the worker to rest")
    assert slug(client.generate()) == "asleep"
    worker.hand_over(version + 1, trainer_model(tiny_models.weights(2)))
    worker.resume()
    assert client.sample(4)["weights"][0]["version"] == version + 1


def test_level_1_keeps_the_values_that_the_trainer_goes_on_to_change(
    worker: Worker, client: Client, version: int, tiny_models: TinyModels, reference_2: Reference
) -> None:
    model = trainer_model(tiny_models.weights(2))
    worker.hand_over(version, model)
    with worker.turn(level=1), torch.no_grad():
        for tensor in model.parameters():
            tensor.zero_()
    output = client.sample(8)
    assert output["token_ids"] == reference_2.greedy(PROMPT, 8)
    assert output["weights"][0]["version"] == version


def test_the_example_learns_with_the_engine_in_its_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It compares its own logprobs with the engine's at each step, and ends if they differ."""
    script = str(Path(__file__).parents[2] / "examples" / "hybrid" / "train.py")
    monkeypatch.setattr(sys, "argv", [script, "--steps", "2"])
    runpy.run_path(script, run_name="__main__")
    steps = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert steps == [["step", "1"], ["step", "2"]]
