"""Replay records of hf and SGLang, against transformers: experts of a mixture, and which tokens could be drawn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_client import AsyncRolloutPool, GenerateResult
from rollout_common.wire import GenerateOutput, GenerateResponse, RoutedExperts
from rollout_common.wire.event_frames import FrameReader
from tests.support.engine.engine_kinds import KINDS, engine_args, left_out
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import script
from tests.support.engine.workers import PROMPT, InProcess, in_process, several_in_process, slug

LAYERS, TOP_K = 2, 8
LONG = [3 + (index * 37) % 4000 for index in range(700)]
"""A prompt that is read in several pieces."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home, maker = tmp_path_factory.mktemp("mixtures"), script()
    shape = maker.Shape(hidden=64, intermediate=32, heads=2, experts=16, tied=False)
    for seed in (1, 2):
        maker.make_model(home / str(seed), seed, shape)
    return [home / "1", home / "2"]


@pytest.fixture(scope="module", params=["hf", "sglang"])
def workers(folders: list[Path], request: pytest.FixtureRequest) -> Iterator[list[InProcess]]:
    """Two workers with hf, and one with SGLang, which takes more memory."""
    kind = KINDS[request.param]
    if left_out(kind):
        pytest.skip(str(left_out(kind)))
    flags = ["--engine", kind.engine, "--weights-roots", str(folders[0].parent)]
    if kind.engine == "sglang":
        flags += engine_args(f"--python={kind.python}", "--enable-return-routed-experts")
    count = 2 if kind.engine == "hf" else 1
    with several_in_process(folders[0], *flags, own=[()] * count) as workers:
        yield workers


@pytest.fixture(scope="module")
def judges(folders: list[Path]) -> list[Reference]:
    return [Reference(folder) for folder in folders]


@torch.no_grad()
def true_routes(judge: Reference, ids: list[int]) -> np.ndarray[Any, Any]:
    """The experts that transformers chooses for each token, [N, layers, top_k]."""
    found = judge.model(torch.tensor([ids]), output_router_logits=True, use_cache=False)
    rows = [layer.softmax(-1).topk(TOP_K, dim=-1).indices for layer in found.router_logits]
    return torch.stack(rows, dim=1).numpy()


def check_routes(
    record: RoutedExperts | None, judge: Reference, prompt: list[int], output: GenerateOutput
) -> None:
    assert record is not None
    ids = [*prompt, *output.token_ids]
    assert (record.layers, record.top_k, record.dtype) == (LAYERS, TOP_K, "uint8")
    assert record.start + record.rows == len(ids) - 1
    expected = true_routes(judge, ids)[record.start : len(ids) - 1]
    assert (np.sort(record.to_array(), axis=2) == np.sort(expected, axis=2)).all()


def outputs(worker: InProcess, prompt: list[int], **fields: Any) -> tuple[GenerateOutput, ...]:
    answer = worker.generate(token_ids=prompt, **fields)
    assert answer.status_code == 200, answer.text
    return GenerateResponse.model_validate(answer.json()).outputs


@pytest.mark.parametrize("prompt", [[5], LONG], ids=len)
def test_routes_are_those_of_transformers(
    workers: list[InProcess], judges: list[Reference], prompt: list[int]
) -> None:
    """Of prompt and output; the outputs of one request share their prompt's. Next to requests that ask for none."""
    sampling = {"max_tokens": 20, "seed": 1, "n": 3, "ignore_eos": True}
    beside = {"token_ids": LONG[:90], "sampling": {"max_tokens": 60, "ignore_eos": True}}
    plain = [workers[0].in_background(lambda: workers[0].generate(**beside)) for _ in range(2)]
    found = outputs(workers[0], prompt, sampling=sampling, return_routed_experts=True)
    for output in found:
        start = 0 if output.index == 0 else len(prompt) - 1
        assert output.routed_experts is not None
        assert output.routed_experts.start == start
        check_routes(output.routed_experts, judges[0], prompt, output)
    for future in plain:
        assert "routed_experts" not in future.result(60).json()["outputs"][0]


def frames_of(worker: InProcess, stream: bool, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """What comes in binary frames, read in pieces."""
    headers = {"Accept": "application/octet-stream"}
    answer = worker.data.post("/v1/generate", json={"stream": stream, **fields}, headers=headers)
    assert answer.headers["content-type"] == headers["Accept"]
    refused = worker.data.post("/v1/generate", json={"token_ids": []}, headers=headers)
    assert refused.headers["content-type"].startswith("application/problem+json")
    reader, content = FrameReader(), answer.content
    return [
        (name, json.loads(data))
        for at in range(0, len(content), 1000)
        for name, data in reader.push_bytes(content[at : at + 1000])
    ]


@pytest.mark.parametrize("way", ["events", "frames", "frames at the end"])
def test_a_stream_brings_the_same_records(workers: list[InProcess], way: str) -> None:
    sampling = {"max_tokens": 30, "seed": 1, "n": 2, "ignore_eos": True, "top_k": 50}
    asked = {"sampling": sampling, "return_routed_experts": True, "return_sampling_mask": True}
    whole = outputs(workers[0], LONG, **asked)
    if way == "events":
        events = workers[0].stream(token_ids=LONG, **asked)
    else:
        events = frames_of(workers[0], way == "frames", token_ids=LONG, **asked)
    assert events[-1][0] == "done"
    rows: dict[int, bytes] = {0: b"", 1: b""}
    masks: dict[int, list[int]] = {0: [], 1: []}
    for name, data in events:
        if name == "routed_experts":
            assert not rows[0] or len(rows[0]) % (LAYERS * TOP_K) == 0
            rows[0] += RoutedExperts.model_validate(data).to_bytes()
        elif name == "delta":
            routes = RoutedExperts.model_validate(data["routed_experts"])
            assert routes.rows == len(data["token_ids"])
            rows[data["index"]] += routes.to_bytes()
            assert len(data["sampling_mask"]["counts"]) == len(data["token_ids"])
            masks[data["index"]] += data["sampling_mask"]["counts"]
    for output in whole:
        assert output.routed_experts is not None
        assert output.sampling_mask is not None
        assert output.routed_experts.to_bytes() == rows[output.index]
        assert list(output.sampling_mask.counts) == masks[output.index]


@pytest.mark.parametrize("policy", ["Keep", "Recompute", "Pin", "Abort"])
def test_new_weights_leave_a_row_for_each_token(
    workers: list[InProcess], folders: list[Path], judges: list[Reference], policy: str
) -> None:
    """Rows of the tokens that the first version read stay; those after it are the second's."""
    worker = workers[0]
    if policy not in worker.data.get("/v1/info").json()["capabilities"]["in_flight"]:
        pytest.skip(f"it has no {policy}")
    sampling = {"max_tokens": 400, "ignore_eos": True}
    asked = {"sampling": sampling, "return_routed_experts": True}
    running = worker.in_background(lambda: worker.generate(token_ids=LONG, **asked))
    before = worker.state()["weights"]["active"]
    seed = 1 if before["labels"].get("seed") == "2" else 2
    epoch, version = max(1, before["epoch"]), before["version"] + 1
    slot = worker.stage(epoch, version, folders[seed - 1], labels={"seed": str(seed)})
    assert slot["phase"] == "Staged", slot
    worker.commit(epoch, version, in_flight=policy)
    answer = running.result(120)
    [output] = GenerateResponse.model_validate(answer.json()).outputs
    assert output.routed_experts is not None or not output.token_ids
    if output.routed_experts is None:
        return
    assert output.routed_experts.rows == len(LONG) + len(output.token_ids) - 1
    first = output.weights[0]
    by = judges[(2 if seed == 1 else 1) - 1 if first.version == before["version"] else seed - 1]
    made = output.routed_experts.to_array()[: len(LONG) + first.end - 1]
    expected = true_routes(by, [*LONG, *output.token_ids])[: len(made)]
    assert (np.sort(made, axis=2) == np.sort(expected, axis=2)).all()


def start_recorded(
    pool: AsyncRolloutPool, prompt: list[int], sampling: dict[str, Any]
) -> asyncio.Task[GenerateResult]:
    """Start a generation with both records."""
    return asyncio.create_task(
        pool.generate(
            prompt, sampling=sampling, return_routed_experts=True, return_sampling_mask=True
        )
    )


async def test_a_broken_output_goes_on_with_all_its_rows(workers: list[InProcess]) -> None:
    """Aborted again and again, it is continued on either worker; rows cover prompt and output once."""
    sampling = {"max_tokens": 120, "ignore_eos": True, "top_k": 9}
    async with AsyncRolloutPool.from_urls([worker.url for worker in workers]) as pool:
        await pool.wait_serving(len(workers))
        running = start_recorded(pool, LONG, sampling)
        while not running.done():
            await asyncio.sleep(0.1)
            for worker in workers:
                await asyncio.to_thread(worker.post, "abort", all=True)
        result = await running
    output = result.output
    assert len(result.attempts) > 1
    assert output.routed_experts is not None
    assert output.sampling_mask is not None
    assert (output.routed_experts.start, output.routed_experts.rows) == (0, len(LONG) + 119)
    assert output.sampling_mask.counts == (9,) * 120
    allowed = output.sampling_mask.allowed_ids()
    assert all(token in ids for token, ids in zip(output.token_ids, allowed, strict=True))


def test_what_cant_be_recorded_is_refused(
    workers: list[InProcess], tiny_models: Any, tmp_path: Path
) -> None:
    for field in ("return_routed_experts", "return_sampling_mask"):
        answer = workers[0].generate(
            token_ids=PROMPT, sampling={"max_tokens": 0}, prompt_logprobs=True, **{field: True}
        )
        assert (answer.status_code, slug(answer)) == (422, "unsupported")
        assert answer.json()["errors"][0]["field"] == field
    with in_process(tiny_models.model(1)) as dense:
        able = dense.data.get("/v1/info").json()["capabilities"]
        assert (able["return_routed_experts"], able["return_sampling_mask"]) == (False, True)
        answer = dense.generate(token_ids=PROMPT, return_routed_experts=True)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == "return_routed_experts"
