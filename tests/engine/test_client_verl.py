"""verl's interfaces over real workers: by hand, and by verl's own agent loops from its wheel."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout_client.errors import PublishFailed
from rollout_client.integrations.verl import PoolSettings, VerlClient
from rollout_client.integrations.verl_rollout import VerlRollout
from tests.support.doc_manifests import code_blocks
from tests.support.engine.rays import run_job
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT, InProcess, in_process, ports_of, several_in_process
from tinymodel import Shape, make_model

ROOT = Path(__file__).parents[2]
VERL = Path(os.environ.get("ROLLOUT_CACHE", ROOT / ".cache"), "env-verl")
JOB = ROOT / "tests" / "support" / "engine" / "verl_job.py"
PAGE = "from-verl.md"
STEPS = 2


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared volume."""
    return tmp_path_factory.mktemp("volume")


@pytest.fixture(scope="module")
def workers(tiny_models: TinyModels, volume: Path) -> Iterator[list[InProcess]]:
    flags = ["--weights-roots", str(volume), "--weights-port", "0"]
    with several_in_process(tiny_models.model(1), *flags) as workers:
        yield workers


@dataclass
class Config:
    """The fields of verl's RolloutConfig that are read."""

    custom: dict[str, Any] | None
    prompt_length: int = 512
    response_length: int = 5
    seed: int = 42
    full_determinism: bool = False
    ignore_eos: bool = False


@pytest.fixture
def config(workers: list[InProcess]) -> Config:
    return Config({"pool": ports_of(workers)})


@pytest.fixture
async def client(config: Config) -> AsyncIterator[VerlClient]:
    client = VerlClient.of(config)
    yield client
    await client.close()


@pytest.fixture
async def rollout(config: Config) -> AsyncIterator[VerlRollout]:
    rollout = VerlRollout(config, model_config=None, device_mesh=None)
    yield rollout
    await rollout.close()


# Weights.


def reused(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """As trainers do: one buffer for all, overwritten with the next tensor."""
    buffer = torch.empty(max(t.numel() for t in tensors.values()))
    for name, tensor in tensors.items():
        view = buffer[: tensor.numel()].view(tensor.shape)
        view.copy_(tensor)
        yield name, view


async def test_the_step_is_the_version_of_weights_that_come_from_memory(
    rollout: VerlRollout, workers: list[InProcess], tiny_models: TinyModels, volume: Path
) -> None:
    first, second = (load_file(tiny_models.weights(seed) / "model.safetensors") for seed in (2, 3))

    async def generator() -> AsyncIterator[tuple[str, torch.Tensor]]:
        for name, tensor in reused(first):
            yield name, tensor

    await rollout.update_weights(generator(), global_steps=0)
    active = workers[0].state()["weights"]["active"]
    assert (active["epoch"] > 0, active["version"]) == (True, 0)
    with in_process(tiny_models.model(2)) as other:
        assert workers[1].sample(8)["token_ids"] == other.sample(8)["token_ids"]
    versions = []
    # Without a step verl sends again what it sent last.
    for tensors, step in ((second, 2), (second, None), (first, 3), (first, None), (second, 4)):
        await rollout.update_weights(reused(tensors), global_steps=step)
        versions.append(workers[1].state()["weights"]["active"]["version"])
    assert versions == [2, 2, 3, 3, 4]
    assert os.listdir(volume) == []
    with pytest.raises(PublishFailed, match="content-mismatch"):
        await rollout.update_weights(reused(first))


@pytest.mark.parametrize("durable", [False, True], ids=["memory", "folder"])
async def test_a_sleeping_pool_takes_weights(
    config: Config,
    workers: list[InProcess],
    tiny_models: TinyModels,
    volume: Path,
    durable: bool,
) -> None:
    """As with `free_cache_engine`: asleep while the trainer learns, published, then awake."""
    assert config.custom is not None
    folder = {"folder": str(volume)} if durable else {}
    rollout = VerlRollout(Config({"pool": {**config.custom["pool"], **folder}}))
    for step, seed in ((1, 2), (2, 3), (3, 2)):
        tensors = load_file(tiny_models.weights(seed) / "model.safetensors")
        await rollout.release()
        await rollout.resume(["weights"])
        assert workers[0].state()["lifecycle"] == "Asleep"
        await rollout.update_weights(reused(tensors), global_steps=step)
        await rollout.resume(["kv_cache"])
        assert workers[1].state()["weights"]["active"]["version"] == step
    with in_process(tiny_models.model(2)) as other:
        assert workers[1].sample(8)["token_ids"] == other.sample(8)["token_ids"]
    assert len(os.listdir(volume)) == (2 if durable else 0), "old versions are deleted"
    # A colocated reward model had the devices: the same step once more, asleep and awake.
    await rollout.release()
    await rollout.update_weights(reused(tensors))
    await rollout.resume(["kv_cache"])
    await rollout.update_weights(reused(tensors))
    assert workers[0].state()["weights"]["active"]["version"] == 3
    await rollout.close()


async def test_only_the_first_rank_writes_and_every_rank_takes_all(
    config: Config, rollout: VerlRollout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def generator() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b", "a"):
            taken.append(name)
            yield name, torch.zeros(2)

    assert config.custom is not None
    elsewhere = Config({"pool": {**config.custom["pool"], "folder": str(tmp_path)}})
    monkeypatch.setenv("RANK", "1")
    follower = VerlRollout(elsewhere)
    await follower.update_weights(generator())
    await follower.release()
    await follower.resume(["kv_cache"])
    assert taken == ["a", "b", "a"]
    assert os.listdir(tmp_path) == []
    await follower.close()
    # Whatever goes wrong, nobody is left waiting in a collective.
    for error, extra in (
        (NotImplementedError, {"wire_format": "delta_flush"}),
        (NotImplementedError, {"peft_config": object()}),
        (ValueError, {}),  # a name came twice
    ):
        taken.clear()
        with pytest.raises(error):
            await rollout.update_weights(generator(), **extra)
        assert taken == ["a", "b", "a"]
    with pytest.raises(ValueError, match="unknown tags"):
        await rollout.resume(["optimizer"])


# Generating.


async def test_sampling_parameters_are_translated_or_refused(client: VerlClient) -> None:
    given = {"temperature": 0, "top_k": -1, "max_new_tokens": 4, "ignore_eos": True}
    ask = partial(client.generate, "c", prompt_ids=PROMPT)
    # As verl's agent loops call it: media that are none, and a number for every sample.
    answer = await ask(
        sampling_params=given, mm_processor_output=None, mm_processor_kwargs={}, priority=3
    )
    assert len(answer.token_ids) == 4
    assert (answer.log_probs, answer.stop_reason) == (None, "length")
    assert given == {"temperature": 0, "top_k": -1, "max_new_tokens": 4, "ignore_eos": True}
    more = {"ignore_eos": True, "logprobs": 0}
    answer = await ask(sampling_params=more)
    assert len(answer.token_ids) == len(answer.log_probs or ()) == 5, "response_length"
    assert answer.extra_fields["num_cached_tokens"] is not None
    for params, said in (({"best_of": 2}, "best_of"), ({"n": 2}, "n must"), ({"logprobs": 5}, "5")):
        with pytest.raises(ValueError, match=said):
            await ask(sampling_params=params)
    for media in ("image_data", "video_data", "audio_data", "mm_processor_output"):
        with pytest.raises(NotImplementedError, match=media):
            await partial(ask, **{media: [1]})(sampling_params={})


async def test_a_budget_is_cut_to_what_the_model_takes(
    config: Config, workers: list[InProcess]
) -> None:
    longest = workers[0].data.get("/v1/info").json()["max_length"]
    config.response_length, config.prompt_length = longest, longest
    client = VerlClient.of(config)
    params = {"ignore_eos": True}
    for budget in ({}, {"max_tokens": 10 * longest}):
        prompt = [5] * (longest - 3)
        answer = await client.generate("c", prompt_ids=prompt, sampling_params={**params, **budget})
        assert (len(answer.token_ids), answer.stop_reason) == (3, "length")
    with pytest.raises(ValueError, match=f"the model takes {longest}"):
        await client.generate("c", prompt_ids=[5] * longest, sampling_params=params)
    await client.close()
    # A conversation that has used up a part of its length leaves the rest.
    config.prompt_length, config.response_length = 8, 6
    client = VerlClient.of(config)
    for length, left in ((4, 6), (10, 4), (13, 1), (20, 1)):
        answer = await client.generate("c", prompt_ids=[5] * length, sampling_params=params)
        assert len(answer.token_ids) == left
    await client.close()


async def test_a_client_crosses_processes_with_its_settings(
    config: Config, client: VerlClient
) -> None:
    config.full_determinism = True
    params = {"ignore_eos": True}
    seeded = VerlClient.of(config)
    tokens = []
    for each in (seeded, seeded):
        again = pickle.loads(pickle.dumps(each))
        answer = await again.generate("c", prompt_ids=PROMPT, sampling_params=params)
        tokens.append(answer.token_ids)
        await again.close()
    assert tokens[0] == tokens[1]
    await client.generate("c", prompt_ids=PROMPT, sampling_params=params)
    pickle.loads(pickle.dumps(client))  # also one that has been used


def test_settings_that_name_no_pool_are_refused() -> None:
    for custom, said in (
        (None, "custom.pool"),
        ({"pool": {}}, "a name or urls"),
        ({"pool": {"name": "math", "urls": ["http://a:8000"]}}, "either"),
        ({"pool": {"name": "math", "folders": "/weights"}}, "folders"),
    ):
        with pytest.raises(ValueError, match=said):
            PoolSettings.of(Config(custom))
    with pytest.raises(
        ValueError, match="transport must be one of auto, shm, tcp, nixl, not 'nccl'"
    ):
        PoolSettings.of(Config({"pool": {"name": "math", "transport": "nccl"}}))


# verl itself.


def slept(worker: InProcess) -> float:
    """How often a worker has fallen asleep."""
    metrics = worker.data.get("/metrics").text
    line = r'^rollout_worker_transition_seconds_count\{.*transition="sleep".*\} (\S+)$'
    (count,) = re.findall(line, metrics, re.MULTILINE)
    return float(count)


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16, as most are; verl trains it in float32."""
    folder = tmp_path_factory.mktemp("bf16") / "model"
    make_model(folder, 1, Shape(dtype="bfloat16"))
    return folder


def metric(line: str, name: str) -> float:
    (value,) = re.findall(rf"{re.escape(name)}:(\S+)", line)
    return float(value)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not VERL.exists(), reason="no environment with verl: make test makes it")
@pytest.mark.parametrize(
    "durable", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["memory", "folder"]
)
def test_verls_default_trainer_runs_over_a_pool(
    bf16: Path, volume: Path, tmp_path: Path, durable: bool
) -> None:
    """`main_ppo` as verl ships it, with the page's configuration: FSDP in float32, TransferQueue, Ray."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (plugin,) = project["entry-points"]["verl.plugins"].values()
    flags = ["--weights-roots", str(volume), "--weights-port", "0"]
    with several_in_process(bf16, *flags) as workers:
        pool = ports_of(workers)
        (yaml,) = code_blocks(PAGE, "yaml")
        settings = {
            "yaml": yaml,
            "model": str(bf16),
            "pool": {**pool, "folder": str(volume)} if durable else pool,
            "rollout": {"free_cache_engine": durable},
            "steps": STEPS,
        }
        sleeps = [slept(worker) for worker in workers]
        said = run_verl(settings, plugin, tmp_path)
        steps = [line for line in said.splitlines() if re.search(r"\bstep:\d+ - ", line)]
        assert len(steps) == STEPS, said[-5000:]
        for line in steps:
            # Up to 0.03 and 0.001 (measured); with the weights of the step before 2.1 and 0.015. The worst of all
            # tokens is no measure: bfloat16 moved one by 0.033.
            assert metric(line, "rollout_corr/log_ppl_abs_diff") < 0.2
            assert metric(line, "training/rollout_probs_diff_mean") < 0.005
            assert metric(line, "critic/rewards/mean") > 0
        for worker, before in zip(workers, sleeps, strict=True):
            weights = worker.state()["weights"]
            assert weights["active"]["version"] == STEPS, "verl's step is the version"
            assert (slept(worker) > before) == durable
        assert workers[0].sample(8)["token_ids"] == workers[1].sample(8)["token_ids"]
        with in_process(bf16) as before_training:
            assert workers[0].sample(8) != before_training.sample(8)


def run_verl(settings: dict[str, Any], plugin: str, folder: Path) -> str:
    """Run verl in a process of its own and return what it printed."""
    (folder / "settings.json").write_text(json.dumps(settings))
    env = {
        "PYTHONPATH": f"{ROOT / 'src'}:{VERL}:{JOB.parent}",
        # The processor as verl's accelerator, see verl_cpu.py.
        "VERL_USE_EXTERNAL_MODULES": f"verl_cpu,{plugin}",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_ENGINE_VENDOR": "nvidia",
        "HF_HUB_OFFLINE": "1",
    }
    return run_job([sys.executable, JOB, folder / "settings.json"], folder, 800, **env)
