"""LoRA adapters as a version of weights: staged, committed and labelled as any, and applied to the requests that name them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_common.wire.adapters import CONFIG_KEY, AdapterConfig, entry_name
from tests.support.engine.contracts import Fleet, Served, made_by, outputs_of, pieces
from tests.support.engine.engine_kinds import EngineKind, engine_args, kinds
from tests.support.engine.lora_adapters import (
    LORA_FLAGS,
    adapter_tensors,
    merged_reference,
    save_adapter,
)
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT, slug
from tests.support.unit.pushing import Version
from tests.support.waiting import until_sync

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SEEDS = (1, 2, 3)
_numbers = itertools.count()
RESTARTED = [
    pytest.param(
        kind,
        marks=[pytest.mark.skip("its engine is the worker")] * kind.in_process
        + [pytest.mark.soak] * (kind.name == "vllm"),
    )
    for kind in kinds()
]
"""The death of SGLang that is seen every day; vLLM's is in test_contract_restarts.py. All kinds are listed, so that
pytest runs these tests next to the others of their kind, with its worker."""


@pytest.fixture(scope="module")
def tensors(tiny_models: TinyModels) -> dict[int, dict[str, torch.Tensor]]:
    return {seed: adapter_tensors(tiny_models.model(1), seed) for seed in SEEDS}


@pytest.fixture(scope="module")
def merged(
    tiny_models: TinyModels, tensors: dict[int, dict[str, torch.Tensor]]
) -> dict[int, Reference]:
    return {seed: merged_reference(tiny_models.model(1), tensors[seed]) for seed in SEEDS}


@pytest.fixture
def able(fleet: Fleet, kind: EngineKind) -> Iterator[Served]:
    """A worker that serves adapters."""
    worker = fleet.worker(*engine_args(*LORA_FLAGS[kind.engine]))
    worker.heal()
    yield worker
    until_sync(worker.idle, 30, what="requests to end")


class Adapters:
    """Writes and loads versions of adapters."""

    def __init__(self, worker: Served, tensors: dict[int, dict[str, torch.Tensor]]) -> None:
        self.worker, self.tensors = worker, tensors

    def folder(self, **seeds: int) -> Path:
        """A version in the worker's volume, of adapters by name."""
        home = self.worker.folder / f"adapters-{next(_numbers)}"
        for name, seed in seeds.items():
            save_adapter(home if name == "default" else home / name, self.tensors[seed])
        return home

    def stage(self, **seeds: int) -> tuple[int, int]:
        identity = self.worker.next_version()
        slot = self.worker.stage(*identity, self.folder(**seeds), labels={"seed": "9"})
        assert slot["phase"] == "Staged", slot
        assert [each["name"] for each in slot["adapters"]] == sorted(seeds)
        return identity

    def load(self, commit: dict[str, Any] | None = None, **seeds: int) -> tuple[int, int]:
        identity = self.stage(**seeds)
        self.worker.commit(*identity, **(commit or {"in_flight": "Abort"}))
        return identity


@pytest.fixture
def adapters(able: Served, tensors: dict[int, dict[str, torch.Tensor]]) -> Adapters:
    return Adapters(able, tensors)


def test_each_request_gets_its_own_adapter(
    able: Served, adapters: Adapters, merged: dict[int, Reference], reference: dict[int, Reference]
) -> None:
    """In one batch with others and with none: ids, logprobs, spans, streams and scores."""
    epoch, version = adapters.load(alpha=1, beta=2)
    asked: list[tuple[str | None, Reference]] = [
        (None, reference[1]),
        ("alpha", merged[1]),
        ("beta", merged[2]),
    ]
    waiting = [
        (judge, name, able.in_background(partial(able.outputs, GREEDY, adapter=name)))
        for _ in range(3)
        for name, judge in asked
    ]
    assert merged[1].greedy(PROMPT, 12) != reference[1].greedy(PROMPT, 12)
    for judge, name, waited in waiting:
        [output] = waited.result(60)
        assert output["token_ids"] == judge.greedy(PROMPT, 12), name
        own = judge.raw_logprobs(PROMPT, output["token_ids"])
        assert output["logprobs"] == pytest.approx(own, abs=2e-3)
        [span] = output["weights"]
        assert (span["epoch"], span["version"], span.get("adapter")) == (epoch, version, name)
    events = able.stream(sampling=GREEDY, adapter="beta")
    streamed = pieces(events, 0)
    assert streamed["token_ids"] == merged[2].greedy(PROMPT, 12)
    assert all(span["adapter"] == "beta" for _, d in events[:-1] for span in d["weights"])
    answer = able.generate(
        adapter="alpha", sampling={"max_tokens": 0}, prompt_logprobs=True, logprobs="raw"
    )
    scores = answer.json()["prompt_logprobs"]
    own = merged[1].raw_logprobs(PROMPT[:1], PROMPT[1:])
    assert scores["logprobs"][1:] == pytest.approx(own, abs=2e-3)


def test_a_new_version_replaces_them_all(
    able: Served, adapters: Adapters, merged: dict[int, Reference], reference: dict[int, Reference]
) -> None:
    """A name means the active version's adapter, never another one's; what is staged changes nothing."""
    adapters.load(policy=1)
    able.outputs(GREEDY, adapter="policy")  # whatever an engine keeps of prefixes
    epoch, version = adapters.stage(policy=2, other=3)
    [before] = able.outputs(GREEDY, adapter="policy")
    assert before["token_ids"] == merged[1].greedy(PROMPT, 12)
    able.commit(epoch, version)
    [after] = able.outputs(GREEDY, adapter="policy")
    assert after["token_ids"] == merged[2].greedy(PROMPT, 12)
    assert made_by(after) == [(version, False)]
    served = able.state()["weights"]["active"]["adapters"]
    assert [(each["name"], each["rank"]) for each in served] == [("other", 8), ("policy", 8)]
    assert served[0]["root_hash"] != served[1]["root_hash"]
    # The names go round: no slot or prefix of the former ones is found again.
    adapters.load(policy=3, other=1)
    [again] = able.outputs(GREEDY, adapter="policy")
    assert again["token_ids"] == merged[3].greedy(PROMPT, 12)
    [other] = able.outputs(GREEDY, adapter="other")
    assert other["token_ids"] == merged[1].greedy(PROMPT, 12)
    able.load(1)
    answer = able.generate(adapter="policy", sampling=GREEDY)
    assert (answer.status_code, slug(answer)) == (422, "unsupported")
    assert answer.json()["errors"][0]["field"] == "adapter"
    [plain] = able.outputs(GREEDY)
    assert plain["token_ids"] == reference[1].greedy(PROMPT, 12)


@pytest.mark.parametrize("policy", ["Drain", "Abort", "Keep", "Recompute", "Pin"])
def test_an_update_below_running_requests(
    able: Served, adapters: Adapters, merged: dict[int, Reference], policy: str
) -> None:
    _, old = adapters.load(policy=1, leaving=3)
    epoch, new = adapters.stage(policy=2)
    if policy not in able.able["adapters_in_flight"]:
        answer = able.post("weights/commit", epoch=epoch, version=new, in_flight=policy)
        assert (answer.status_code, slug(answer)) == (422, "unsupported")
        assert answer.json()["errors"][0]["field"] == "in_flight"
        able.post("weights/discard", epoch=epoch, version=new)
        return
    running = able.busy(8, 200, adapter="policy", logprobs="raw")
    leaving = able.busy(1, 200, adapter="leaving")
    able.makes(30)
    able.commit(epoch, new, in_flight=policy, deadline_seconds=60)
    judges = {old: merged[1], new: merged[2]}
    for answer in running():
        [output] = outputs_of(answer)
        for span in output["weights"]:
            assert span["adapter"] == "policy"
            if not span["stale_kv"]:
                upto = output["token_ids"][: span["end"]]
                own = judges[span["version"]].raw_logprobs(PROMPT, upto)[span["start"] :]
                got = output["logprobs"][span["start"] : span["end"]]
                assert got == pytest.approx(own, abs=2e-3), span
    [answer] = leaving()
    [output] = answer.json()["outputs"]
    assert {span["version"] for span in output["weights"]} <= {old}
    if policy in ("Abort", "Keep", "Recompute"):
        assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "weights")
    else:
        assert output["stop_reason"] == "length"
    [after] = able.outputs(GREEDY, adapter="policy")
    assert after["token_ids"] == merged[2].greedy(PROMPT, 12)


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_outlive_sleep(
    able: Served, adapters: Adapters, merged: dict[int, Reference], level: int
) -> None:
    if level not in able.able["sleep_levels"]:
        pytest.skip(f"{able.kind} has no level {level}")
    adapters.load(policy=1)
    assert able.post("sleep", level=level).status_code == 200
    assert able.post("wake").status_code == 200
    until_sync(able.ready, 60, what="the worker to serve")
    [output] = able.outputs(GREEDY, adapter="policy")
    assert output["token_ids"] == merged[1].greedy(PROMPT, 12)


def test_what_is_no_adapter_of_the_model_is_refused_while_it_is_staged(
    able: Served,
    adapters: Adapters,
    tensors: dict[int, dict[str, torch.Tensor]],
    merged: dict[int, Reference],
) -> None:
    """By what the engine knows of its model; every other fault is in tests/unit/worker/test_worker_lora.py."""
    adapters.load(policy=1)
    good, home = tensors[2], able.folder / f"bad-{next(_numbers)}"
    first = next(iter(good))
    unknown = {name.replace("layers.0", "layers.99"): tensor for name, tensor in good.items()}
    thin = {**good, first: good[first][:, 1:].contiguous()}
    head = {**good, "base_model.model.lm_head.weight": torch.zeros(4, 4)}
    for said, bad in (("layers.99", unknown), ("must be", thin), ("lm_head", head)):
        slot = able.stage(*able.next_version(), save_adapter(home / said.replace(" ", "-"), bad))
        assert slot["phase"] == "Failed", said
        assert said in slot["error"]
    [output] = able.outputs(GREEDY, adapter="policy")
    assert output["token_ids"] == merged[1].greedy(PROMPT, 12)
    # Nor does any belong to weights other than the model's own.
    able.load(2, in_flight="Abort")
    slot = able.stage(*able.next_version(), adapters.folder(policy=1))
    assert slot["phase"] == "Failed"
    assert "checkpoint" in slot["error"]


def test_a_request_names_a_served_adapter(able: Served, adapters: Adapters) -> None:
    adapters.load(policy=1)
    for name in ("Policy", "default", "x" * 63):
        answer = able.generate(adapter=name, sampling=GREEDY)
        assert (answer.status_code, slug(answer)) == (422, "unsupported")
        assert "policy" in answer.json()["detail"]


def pushed_version(tensors: Mapping[str, torch.Tensor], name: str) -> Version:
    """An adapter in a trainer's memory."""
    config = AdapterConfig(8, 16.0).encode()
    found: dict[str, tuple[str, tuple[int, ...], bytes]] = {
        entry_name(name, CONFIG_KEY): ("U8", (len(config),), config)
    }
    for key, tensor in tensors.items():
        found[entry_name(name, key)] = ("F32", tuple(tensor.shape), tensor.numpy().tobytes())
    return Version.of(found)


def push_version(worker: Served, given: Version) -> None:
    """Push a version, and commit it."""
    identity = worker.push(given, "9")
    done = worker.commit(*identity, in_flight="Abort")
    assert done["active"]["root_hash"] == given.root_hash
    given.slot.close()


def test_pushed_adapters_serve_as_those_of_files_do(
    able: Served,
    adapters: Adapters,
    tensors: dict[int, dict[str, torch.Tensor]],
    merged: dict[int, Reference],
) -> None:
    """With the same root hashes."""
    adapters.load(policy=2)
    before = able.state()["weights"]["active"]
    version = pushed_version(tensors[2], "policy")
    assert version.root_hash == before["root_hash"]
    push_version(able, version)
    weights = able.state()["weights"]
    assert weights["active"]["adapters"] == before["adapters"]
    assert weights["kept"]["root_hash"] == before["root_hash"]
    [output] = able.outputs(GREEDY, adapter="policy")
    assert output["token_ids"] == merged[2].greedy(PROMPT, 12)


@pytest.mark.parametrize("kind", RESTARTED, indirect=True, ids=str)
def test_pushed_adapters_come_back_with_the_engine(
    able: Served, tensors: dict[int, dict[str, torch.Tensor]], merged: dict[int, Reference]
) -> None:
    push_version(able, pushed_version(tensors[1], "policy"))
    able.kill_engine()
    until_sync(able.ready, able.kind.start_seconds, what="the engine to be back")
    [output] = able.outputs(GREEDY, adapter="policy")
    assert output["token_ids"] == merged[1].greedy(PROMPT, 12)
