"""verl's interfaces over real workers: by hand, and by verl's own agent loops from its wheel."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout_client.integrations.verl import PoolSettings, VerlClient
from rollout_client.integrations.verl_rollout import VerlRollout
from tinymodels import TinyModels
from workers import PROMPT, InProcess, in_process

ROOT = Path(__file__).parents[2]
VERL = Path(os.environ.get("ROLLOUT_CACHE", ROOT / ".cache"), "env-verl")
JOB = ROOT / "tests" / "support" / "engine" / "verl_job.py"
PAGE = ROOT / "docs" / "from-verl.md"


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared volume."""
    return tmp_path_factory.mktemp("volume")


@pytest.fixture(scope="module")
def workers(tiny_models: TinyModels, volume: Path) -> Iterator[list[InProcess]]:
    with ExitStack() as stack:
        flags = ["--weights-roots", str(volume)]
        model = tiny_models.model(1)
        yield [stack.enter_context(in_process(model, *flags)) for _ in range(2)]


@pytest.fixture
def urls(workers: list[InProcess]) -> dict[str, list[str]]:
    data = [str(w.data.base_url).rstrip("/") for w in workers]
    return {"urls": data, "control_urls": [str(w.control.base_url).rstrip("/") for w in workers]}


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
def config(urls: dict[str, Any], volume: Path) -> Config:
    return Config({"pool": {**urls, "folder": str(volume), "shard_bytes": 2**20}})


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


async def test_weights_come_in_shards_from_any_generator(
    rollout: VerlRollout, workers: list[InProcess], tiny_models: TinyModels, volume: Path
) -> None:
    tensors = load_file(tiny_models.weights(2) / "model.safetensors")

    async def generator() -> AsyncIterator[tuple[str, torch.Tensor]]:
        reused = torch.empty(max(t.numel() for t in tensors.values()))
        for name, tensor in tensors.items():
            # As trainers do: one buffer for all, overwritten with the next tensor.
            view = reused[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view

    await rollout.update_weights(generator(), global_steps=None)
    active = workers[0].state()["weights"]["active"]
    name = f"epoch-{active['epoch']}-version-{active['version']}"
    assert sum(file.endswith(".safetensors") for file in os.listdir(volume / name)) > 1
    with in_process(tiny_models.model(2)) as other:
        assert workers[1].sample(8)["token_ids"] == other.sample(8)["token_ids"]
    for _ in range(3):
        await rollout.update_weights(iter(tensors.items()), global_steps=None)
    ours = [each for each in os.listdir(volume) if each.startswith(f"epoch-{active['epoch']}-")]
    assert len(ours) == 2, "old versions are deleted"


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
    with pytest.raises(ValueError, match="folder"):
        VerlRollout(Config({"pool": {"name": "math"}}))


# verl itself.


def block(kind: str) -> str:
    (found,) = re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return str(found)


def slept(worker: InProcess) -> float:
    """How often a worker has fallen asleep."""
    metrics = worker.data.get("/metrics").text
    line = r'^rollout_worker_transition_seconds_count\{.*transition="sleep".*\} (\S+)$'
    (count,) = re.findall(line, metrics, re.MULTILINE)
    return float(count)


# What is ours is tried by hand above, every day. How verl calls it is settled by the version that is
# pinned, and each of Ray's processes takes fifteen seconds of a processor to import verl.
@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(not VERL.exists(), reason="no environment with verl: make test makes it")
def test_verls_own_agent_loops_run_over_a_pool(
    workers: list[InProcess],
    config: Config,
    tiny_models: TinyModels,
    tmp_path: Path,
) -> None:
    """The page's configuration and code, with verl from its wheel and agent loops in Ray's processes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (plugin,) = project["entry-points"]["verl.plugins"].values()
    assert config.custom is not None
    settings = {
        "yaml": block("yaml"),
        "python": block("python"),
        "model": str(tiny_models.model(1)),
        "tensors": str(tiny_models.weights(3) / "model.safetensors"),
        "pool": config.custom["pool"],
        "rollout": {"prompt_length": 64, "response_length": 6},
        "questions": ["roll out the policy", "let me add"],
    }
    sleeps = [slept(worker) for worker in workers]
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTEST"))}
    env = {
        **kept,
        "PYTHONPATH": f"{ROOT / 'src'}:{VERL}",
        "VERL_USE_EXTERNAL_MODULES": plugin,
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        # On a busy machine its processes take minutes to meet.
        "RAY_raylet_start_wait_time_s": "200",
    }
    done = subprocess.run(
        [sys.executable, JOB, tmp_path / "settings.json"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert [slept(worker) for worker in workers] == [before + 1 for before in sleeps]
    assert said["facts"]["max_global_steps"] == [7, 7]
    assert {span["version"] for spans in said["facts"]["weights"] for span in spans} == {7}
    for prompt, attention, answer, mask, logprobs in zip(
        *(said["batch"][name] for name in ("prompts", "attention_mask", "responses")),
        *(said["batch"][name] for name in ("response_mask", "rollout_log_probs")),
        strict=True,
    ):
        assert (len(prompt), len(answer)) == (64, 6)
        asked = [token for token, real in zip(prompt, attention, strict=False) if real]
        sampled = [token for token, ours in zip(answer, mask, strict=True) if ours]
        assert asked
        assert sampled
        # What the pool sampled is what these weights say of this very prompt.
        again = (
            workers[0]
            .generate(token_ids=asked, sampling={"max_tokens": 1, "temperature": 0})
            .json()
        )
        assert again["outputs"][0]["weights"][0]["version"] == 7
        assert all(logprob <= 0 for logprob in logprobs)
        assert any(logprob < 0 for logprob in logprobs)
    assert "agent_loop/generate_sequences/mean" in said["timing"]
