"""Pictures in prompts, against plain transformers; the same for every engine. Its workers come last: they have other models."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rollout_worker.pictures.picture import content_ref
from rollout_worker.pictures.picture_decoding import decode_picture
from tests.support.api.reviews import reviews
from tests.support.engine.contracts import Fleet, Output, Served, made_by, outputs_of, pieces, sound
from tests.support.engine.engine_kinds import EngineKind
from tests.support.engine.picture_models import (
    PAD,
    VIDEO,
    PictureModels,
    PictureReference,
    encoded,
)

KINDS = {"hf": ("qwen2_vl", "llava"), "vllm": ("qwen2_vl", "llava"), "sglang": ("qwen2_vl",)}
"""Which shapes each engine serves. SGLang 0.5.23 loads no LLaVA: it refuses the way in which all of them choose features."""
CLOSE = 3e-2
"""Of logprobs: environments with torchvision scale pictures by it, others by Pillow, which differ in single values."""
ONE, OTHER, TALL = encoded(1, 200, 200), encoded(3, 200, 200), encoded(2, 40, 120)
"""The first two are of one size: their prompts are equal."""
TEXT = [3 + (index * 37 + index * index) % 400 for index in range(60)]
"""Long enough for several blocks of a prefix cache."""


@pytest.fixture(scope="session", params=["qwen2_vl", "llava"])
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> PictureModels:
    return PictureModels(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture(scope="session")
def vision(
    fleet: Fleet,
    kind: EngineKind,
    models: PictureModels,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    if models.kind not in KINDS.get(kind.engine, ()):
        pytest.skip(f"{kind.engine} does not serve {models.kind}")
    fleet.stop()
    home = tmp_path_factory.mktemp(f"vision-{kind}")
    with reviews() as api:
        vision = Fleet(kind, models, home, api)
        try:
            yield vision
        finally:
            vision.stop()


@pytest.fixture
def worker(vision: Fleet) -> Iterator[Served]:
    worker = vision.worker()
    worker.heal()
    restarts = worker.state()["restarts"]
    yield worker
    state = worker.state()
    assert state["restarts"] == restarts, f"the engine died: {state['last_error']}"


@pytest.fixture
def judge(models: PictureModels) -> PictureReference:
    return models.judge(1)


def sent(data: bytes) -> dict[str, str]:
    return {"data": base64.b64encode(data).decode()}


def named(data: bytes) -> dict[str, str]:
    return {"ref": content_ref(data)}


def prompt_of(judge: PictureReference, *files: bytes) -> list[int]:
    return [*judge.prompt([decode_picture(each) for each in files]), *TEXT]


def asked(
    judge: PictureReference, *files: bytes, tokens: int = 12, **fields: Any
) -> dict[str, Any]:
    """A request whose pictures are sent."""
    return {
        "token_ids": prompt_of(judge, *files),
        "sampling": {"temperature": 0, "max_tokens": tokens, "ignore_eos": True},
        "logprobs": "sampling",
        **({"multimodal": {"images": [sent(each) for each in files]}} if files else {}),
        **fields,
    }


def output_of(worker: Served, body: dict[str, Any]) -> Output:
    [output] = outputs_of(worker.generate(**body))
    return output


def expect(judge: PictureReference, output: Output, files: Sequence[bytes]) -> None:
    pictures = [decode_picture(each) for each in files]
    tokens, logprobs = judge.generate(prompt_of(judge, *files), pictures, masked=True)
    assert output["token_ids"] == tokens
    assert output["logprobs"] == pytest.approx(logprobs, abs=CLOSE)


@pytest.mark.parametrize("files", [[], [ONE], [TALL, ONE], [ONE, OTHER, TALL], [ONE, ONE]], ids=len)
def test_ids_are_those_of_transformers(
    worker: Served, judge: PictureReference, files: list[bytes]
) -> None:
    assert worker.able["multimodal"]
    expect(judge, output_of(worker, asked(judge, *files)), files)


def test_two_pictures_share_no_prefix(worker: Served, judge: PictureReference) -> None:
    """Their prompts are equal: one after the other, and side by side."""
    assert prompt_of(judge, ONE) == prompt_of(judge, OTHER)
    order = [ONE, OTHER, ONE, OTHER, OTHER, ONE]
    for file in order:
        expect(judge, output_of(worker, asked(judge, file)), [file])
    with ThreadPoolExecutor(len(order)) as threads:
        bodies = [asked(judge, file) for file in order]
        outputs = list(threads.map(lambda body: output_of(worker, body), bodies))
    for file, output in zip(order, outputs, strict=True):
        expect(judge, output, [file])


def test_streams_and_samples_have_pictures(worker: Served, judge: PictureReference) -> None:
    body = asked(judge, ONE)
    streamed = pieces(worker.stream(**body), 0)
    sound(streamed)
    expect(judge, streamed, [ONE])
    body["sampling"] = {**body["sampling"], "n": 3}
    answer = worker.generate(**body).json()
    for output in answer["outputs"]:
        expect(judge, output, [ONE])


def test_an_output_goes_on_as_a_prompt(worker: Served, judge: PictureReference) -> None:
    body = asked(judge, ONE)
    tokens = output_of(worker, body)["token_ids"]
    body["token_ids"] += tokens[:5]
    assert output_of(worker, body)["token_ids"][:7] == tokens[5:]


def test_new_weights_see_with_new_features(
    worker: Served, models: PictureModels, judge: PictureReference
) -> None:
    expect(judge, output_of(worker, asked(judge, ONE)), [ONE])
    worker.load(2)
    output = output_of(worker, asked(judge, ONE, multimodal={"images": [named(ONE)]}))
    [(version, stale)] = made_by(output)
    assert (version > 0, stale) == (True, False)
    expect(models.judge(2), output, [ONE])
    worker.load(1)
    expect(judge, output_of(worker, asked(judge, ONE)), [ONE])


def test_a_running_output_sees_again_with_new_weights(
    worker: Served, models: PictureModels, judge: PictureReference
) -> None:
    """Its prefix is computed again, and its picture with it."""
    if "Recompute" not in worker.able["in_flight"]:
        pytest.skip("it can't")
    worker.generate(**asked(judge, ONE))  # so that features of the old weights are kept
    body = asked(judge, ONE, tokens=850)
    epoch, version = worker.stage_next(2)
    running = worker.in_background(lambda: worker.generate(**body))
    worker.makes(10)
    worker.commit(epoch, version, in_flight="Recompute")
    [output] = outputs_of(running.result(120))
    first, second = output["weights"]
    assert (second["version"], second["stale_kv"]) == (version, False)
    cut, tokens = first["end"], output["token_ids"]
    picture = [decode_picture(ONE)]
    prompt = body["token_ids"]
    # Hundreds of tokens have near ties, and the pictures' scaling decides them (`CLOSE`).
    assert max(judge.greedy_gaps(prompt, picture, tokens[:cut])) < CLOSE
    after = tokens[cut : cut + 50]
    assert max(models.judge(2).greedy_gaps([*prompt, *tokens[:cut]], picture, after)) < CLOSE
    assert max(judge.greedy_gaps([*prompt, *tokens[:cut]], picture, after)) > CLOSE


def test_prompts_with_pictures_are_scored(worker: Served, judge: PictureReference) -> None:
    body = asked(judge, ONE, prompt_logprobs=True, top_logprobs=3, logprobs="raw")
    ids = body["token_ids"]
    answer = worker.generate(**{**body, "sampling": {"max_tokens": 0}})
    assert answer.status_code == 200, answer.text
    found = answer.json()["prompt_logprobs"]
    expected = judge.score(ids, [decode_picture(ONE)])
    text = [at for at, token in enumerate(ids) if at and token != PAD]
    assert [found["logprobs"][at] for at in text] == pytest.approx(
        [expected[at] for at in text], abs=CLOSE
    )
    assert {found["logprobs"][at] for at, token in enumerate(ids) if token == PAD} == {None}
    assert found["logprobs"][0] is None


def test_penalties_count_prompts_with_pictures(worker: Served, judge: PictureReference) -> None:
    """The ids that stand for pictures inside an engine are none of the vocabulary."""
    plain = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    for penalties in ({"repetition_penalty": 1.5}, {"frequency_penalty": 1.0}):
        body = asked(judge, ONE, sampling={**plain, **penalties}, logprobs="none")
        assert len(output_of(worker, body)["token_ids"]) == 12


def test_placeholders_are_never_sampled(worker: Served) -> None:
    sampling = {"temperature": 0, "max_tokens": 8, "logit_bias": {str(PAD): 100.0}}
    output = output_of(worker, {"token_ids": TEXT, "sampling": sampling, "logprobs": "none"})
    assert not {PAD, VIDEO} & set(output["token_ids"])
