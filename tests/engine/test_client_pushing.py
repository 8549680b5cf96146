"""A trainer's tensors on two real workers: by shared memory, over TCP, and what is left of failures."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollout_client import PublishFailed, RequestFailed, RolloutPool, WeightsId
from rollout_client.steering import pool_keeper
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import InProcess, ports_of, several_in_process


@pytest.fixture(scope="module")
def workers(tiny_models: TinyModels) -> Iterator[list[InProcess]]:
    # A short path: a socket's has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="push-") as folder:
        own = [("--weights-socket", f"{folder}/{number}.sock") for number in range(2)]
        model = tiny_models.model(1)
        with several_in_process(model, "--weights-port", "0", own=own) as workers:
            yield workers


@pytest.fixture
def pool(workers: list[InProcess], monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutPool]:
    monkeypatch.setattr(pool_keeper, "KEEP_INTERVAL_SECONDS", 0.2)
    with RolloutPool.from_urls(**ports_of(workers)) as pool:
        yield pool


def weights(tiny_models: TinyModels, seed: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(tiny_models.weights(seed) / "model.safetensors")
    return found


def root_hash(tiny_models: TinyModels, seed: int) -> str:
    manifest = json.loads((tiny_models.weights(seed) / "manifest.json").read_text())
    return str(manifest["root_hash"])


def active(workers: list[InProcess]) -> list[tuple[WeightsId, Any]]:
    states = [each.state()["weights"]["active"] for each in workers]
    return [(WeightsId(epoch=s["epoch"], version=s["version"]), s["root_hash"]) for s in states]


def test_pushed_tensors_serve_as_the_same_files_would(
    pool: RolloutPool, workers: list[InProcess], tiny_models: TinyModels
) -> None:
    pool.acquire()
    for version, (seed, transport) in enumerate(
        [(2, "shm"), (3, "tcp"), (1, "auto"), (2, "tcp"), (3, "shm"), (1, "shm")], 1
    ):
        tensors = weights(tiny_models, seed)
        done = pool.publish_weights(version, tensors=tensors, transport=transport)  # type: ignore[arg-type]
        expected = root_hash(tiny_models, seed)
        assert done.root_hash == expected
        assert active(workers) == [(done.identity, expected)] * 2
        assert done.report is not None
        assert {each.transport for each in done.report.replicas.values()} == {
            "shm" if transport == "auto" else transport
        }
        result = pool.generate([5, 6, 7], sampling={"max_tokens": 4, "temperature": 0})
        assert {span.version for span in result.output.weights} == {version}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_other_content_under_the_version_that_serves_is_refused_and_told(
    pool: RolloutPool, workers: list[InProcess], tiny_models: TinyModels, transport: Any
) -> None:
    pool.acquire()
    right, other = weights(tiny_models, 2), weights(tiny_models, 3)
    pool.publish_weights(4, tensors=other, transport=transport)
    done = pool.publish_weights(5, tensors=right, transport=transport)  # as a delta, by TCP
    before = active(workers)
    ways: list[dict[str, Any]] = [
        {"tensors": other, "transport": transport},
        {"tensors": iter(other.items()), "transport": transport},
        {"path": str(tiny_models.weights(3))},
    ]
    # What another trainer of this epoch hears, too.
    for way in ways:
        with pytest.raises(PublishFailed, match=r"content-mismatch: .*version") as raised:
            pool.publish_weights(5, **way)
        assert raised.value.replica is not None
        assert root_hash(tiny_models, 2) in str(raised.value)
        if "tensors" in way:
            assert root_hash(tiny_models, 3) in str(raised.value)
        assert active(workers) == before
        assert [each.state()["weights"]["staged"] for each in workers] == [None] * 2
    with pytest.raises(
        PublishFailed, match=r"are below \(\d+, 5\), which this pool published last"
    ):
        pool.publish_weights(4, tensors=other)
    again = pool.publish_weights(5, tensors=right, transport=transport)
    assert (again.identity, again.root_hash) == (done.identity, done.root_hash)
    assert active(workers) == before
    # The same content is the same, whichever way it came first.
    pool.publish_weights(6, str(tiny_models.weights(3)))
    pool.publish_weights(6, tensors=other, transport=transport)
    with pytest.raises(PublishFailed, match="content-mismatch"):
        pool.publish_weights(6, tensors=right, transport=transport)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_tensors_of_another_dtype_are_cast_if_that_is_asked_for(
    pool: RolloutPool, workers: list[InProcess], tiny_models: TinyModels, transport: Any
) -> None:
    pool.acquire()
    for version, seed in enumerate((2, 3), 1):
        wide = {name: tensor.double() for name, tensor in weights(tiny_models, seed).items()}
        fix = r"wrong dtype: it is F64 .* publish_weights\(…, cast=True\)"
        with pytest.raises(PublishFailed, match=fix):
            pool.publish_weights(version, tensors=wide, transport=transport)
        done = pool.publish_weights(version, tensors=wide, transport=transport, cast=True)
        assert active(workers) == [(done.identity, root_hash(tiny_models, seed))] * 2
    few = {name: tensor.clone() for name, tensor in wide.items()}
    for tensor in few.values():
        tensor.view(-1)[::500] *= -1
    done = pool.publish_weights(3, tensors=few, transport=transport, cast=True)
    assert done.report is not None
    if transport == "tcp":
        assert (done.report.deltas, done.report.bytes_sent < done.report.bytes / 10) == (
            2,
            True,
        )
    narrow = {name: tensor.float() for name, tensor in few.items()}
    assert pool.publish_weights(4, tensors=narrow).root_hash == done.root_hash


def test_weights_that_give_no_finite_logits_are_told_by_name_and_end_no_engine(
    pool: RolloutPool, workers: list[InProcess], tiny_models: TinyModels
) -> None:
    epoch = pool.acquire()
    restarts = [each.state()["restarts"] for each in workers]
    sound = weights(tiny_models, 2)
    bad = {name: torch.full_like(tensor, torch.nan) for name, tensor in sound.items()}
    pool.publish_weights(1, tensors=bad)
    with pytest.raises(RequestFailed) as raised:
        pool.generate([5, 6, 7], sampling={"max_tokens": 4})
    assert raised.value.cause.startswith(
        f"weights ({epoch}, 1) give logits that are not finite (NaN or infinite): publish sound"
    )
    assert raised.value.kept is None or len(raised.value.kept.attempts) == 1
    for tokens in (0, 4):
        with pytest.raises(RequestFailed, match="logits that are not finite"):
            pool.generate([5, 6, 7], sampling={"max_tokens": tokens}, prompt_logprobs=True)
    answer = workers[0].generate(token_ids=[5, 6, 7])
    assert answer.json()["outputs"][0]["abort_slug"] == "not-finite"
    assert [each.state()["restarts"] for each in workers] == restarts
    pool.publish_weights(2, tensors=sound)
    assert pool.generate([5, 6, 7], sampling={"max_tokens": 4}).output.weights[0].version == 2
