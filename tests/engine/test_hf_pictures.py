"""Models that see in the hf engine: greedy ids as transformers' own, in any batch, across updates of the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_worker.engine import Engine, EngineRequest, InvalidRequest
from rollout_worker.engines.recent_values import RecentValues
from rollout_worker.pictures.picture import Picture
from rollout_worker.sources.checkpoint_files import open_source
from tests.support.engine.engines import (
    V1,
    Output,
    follow,
    reaches,
    refilling,
    request,
    run,
    run_all,
    serving,
    update,
)
from tests.support.engine.picture_models import (
    KINDS,
    PAD,
    VIDEO,
    PictureReference,
    make_picture_model,
    picture,
)

ONE, TWO = picture(1), picture(2, 40, 120)


class Models:
    """Folders and their judges, made once."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._judges: dict[Path, PictureReference] = {}

    def folder(self, kind: str, seed: int = 1, **more: Any) -> Path:
        folder = self.home / "-".join([kind, str(seed), *map(str, more.values())])
        return folder if folder.exists() else make_picture_model(folder, kind, seed, **more)

    def judge(self, folder: Path) -> PictureReference:
        if folder not in self._judges:
            self._judges[folder] = PictureReference(folder)
        return self._judges[folder]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def asked(
    name: str, prompt: Sequence[int], pictures: Sequence[Picture] = (), **sampling: Any
) -> EngineRequest:
    wanted = request(name, prompt, **{"max_tokens": 12, "min_tokens": 12, **sampling})
    return replace(wanted, pictures=tuple(pictures), logprobs="raw")


async def check(
    engine: Engine, judge: PictureReference, pictures: Sequence[Picture], name: str = "r"
) -> None:
    """One request gives what transformers gives."""
    prompt = judge.prompt(pictures)
    await engine.prepare_pictures(pictures)
    output = await run(engine, asked(name, prompt, pictures))
    tokens, logprobs = judge.generate(prompt, pictures)
    assert output.token_ids == tokens
    assert output.logprobs == pytest.approx(logprobs, abs=1e-3)


# What the contract suite does not ask hf for.
@pytest.mark.parametrize(("kind", "attention"), [("qwen2_5_vl", "sdpa"), ("qwen2_vl", "eager")])
async def test_ids_are_those_of_transformers(models: Models, kind: str, attention: str) -> None:
    folder = models.folder(kind)
    judge = models.judge(folder)
    async with serving(folder, "--attention", attention) as (engine, _):
        assert engine.capabilities.multimodal
        for pictures in ([], [ONE], [TWO, ONE], [ONE, ONE, TWO]):
            await check(engine, judge, pictures)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_batch_of_pictures_and_texts_in_pieces(models: Models, kind: str) -> None:
    """Pieces of a few tokens cut pictures; rows of all kinds run next to each other.

    A version has the tensors of the checkpoint: though transformers has other names for them, none is copied a second
    time at a commit.
    """
    folder = models.folder(kind)
    judge = models.judge(folder)
    cases: list[list[Picture]] = [[ONE], [], [TWO, ONE], [picture(3)], [ONE], [], [TWO]]
    prompts = [judge.prompt(each, before=20 + index) for index, each in enumerate(cases)]
    async with serving(folder, "--prefill-tokens", "3") as (engine, info):
        assert set(info.layout.required) == {entry.name for entry in open_source(folder).entries}
        parts: Any = engine
        assert parts._parts.loaded.parts == {}
        outputs = await run_all(
            engine,
            [asked(str(i), *each) for i, each in enumerate(zip(prompts, cases, strict=True))],
        )
    for prompt, pictures, output in zip(prompts, cases, outputs, strict=True):
        assert output.token_ids == judge.generate(prompt, pictures)[0]


async def test_pinned_outputs_see_with_their_own_weights(models: Models) -> None:
    folder, new = models.folder("qwen2_vl"), models.folder("qwen2_vl", 2, whole=False)
    first, second = models.judge(folder), models.judge(models.folder("qwen2_vl", 2))
    prompt = first.prompt([ONE])
    async with serving(folder) as (engine, _):
        output, task = await begun_with_picture(engine, prompt)
        await update(engine, new, V1, "pin")
        await check(engine, second, [ONE], "new")
        await task
    assert output.token_ids == first.generate(prompt, [ONE], 200)[0]


async def begun_with_picture(engine: Engine, prompt: Sequence[int]) -> Any:
    """Begin a long output about a picture, and wait for its first tokens."""
    output = Output()
    wanted = asked("long", prompt, [ONE], max_tokens=200, min_tokens=200)
    task = asyncio.create_task(follow(engine, wanted, output))
    await reaches(output, 5)
    return output, task


@pytest.mark.parametrize("level", [1, 2])
async def test_pictures_are_seen_after_sleep(models: Models, level: Any) -> None:
    folder = models.folder("qwen2_vl")
    judge = models.judge(folder)
    async with serving(folder) as (engine, _):
        refill = refilling(engine, folder)
        await check(engine, judge, [ONE])
        await engine.pause()
        await engine.sleep(level, ["weights", "kv_cache"], refill)
        await engine.wake(["weights", "kv_cache"], refill)
        await engine.resume()
        await check(engine, judge, [ONE])


async def test_a_tied_head_is_updated_with_its_embedding(models: Models) -> None:
    folder = models.folder("qwen2_vl", 1, tied=True)
    new = models.folder("qwen2_vl", 2, tied=True, whole=False)
    whole = models.folder("qwen2_vl", 2, tied=True)
    async with serving(folder) as (engine, info):
        assert "lm_head.weight" not in info.layout.required
        assert info.layout.tied == {"lm_head.weight": "model.embed_tokens.weight"}
        await check(engine, models.judge(folder), [ONE])
        await update(engine, new, V1)
        await check(engine, models.judge(whole), [ONE])


async def test_placeholders_are_never_sampled(models: Models) -> None:
    folder = models.folder("qwen2_vl")
    async with serving(folder) as (engine, _):
        for fields in (
            {"logit_bias": {PAD: 100.0, VIDEO: 100.0}},
            {"allowed_token_ids": [PAD, VIDEO, 7]},
            {"repetition_penalty": 1e-3, "logit_bias": {PAD: 100.0}},
            {"logit_bias": {PAD: 100.0}, "temperature": 1.0},
        ):
            output = await run(engine, asked("r", (5, 6), **fields))
            assert not {PAD, VIDEO} & set(output.token_ids), fields
        with pytest.raises(InvalidRequest, match="never sampled"):
            engine.validate(asked("r", (5,), allowed_token_ids=[PAD, VIDEO]))


async def test_placeholders_must_fit_the_pictures(models: Models) -> None:
    folder = models.folder("qwen2_vl")
    judge = models.judge(folder)
    whole = judge.prompt([ONE, TWO])
    cut = whole.index(PAD)
    async with serving(folder) as (engine, _):
        for prompt, pictures, words in (
            (whole, [], r"10 placeholders \(id 500\) and no picture"),
            (whole, [ONE], r"become 6 = 6 tokens, token_ids has 10"),
            (whole[:cut] + whole[cut + 1 :], [ONE, TWO], r"6 \+ 4 = 10 tokens, token_ids has 9"),
            (whole, [TWO, ONE], r"40 x 120 becomes 4 tokens, and token_ids has 6"),
            ((1, *[PAD] * 10, 2), [ONE, TWO], r"90 x 60 becomes 6 tokens, and token_ids has 10"),
            ((1, *[PAD] * 3, 2, *[PAD] * 3), [ONE], "token_ids has 3 placeholders in a row"),
            ((1, VIDEO), [], "placeholders of videos"),
            ((1, 2), [picture(1, 1000, 4)], "takes no picture of 1000 x 4"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                engine.validate(asked("r", prompt, pictures))
    llava = models.folder("llava")
    async with serving(llava) as (engine, _):
        engine.validate(asked("r", (1, *[PAD] * 32, 2), [ONE, TWO]))
        with pytest.raises(InvalidRequest, match="has 4 placeholders in a row"):
            engine.validate(asked("r", (1, *[PAD] * 20, 2, *[PAD] * 12), [ONE, TWO]))


async def test_a_model_without_its_processor_serves_text(models: Models) -> None:
    folder = models.folder("qwen2_vl", 3)
    (folder / "preprocessor_config.json").unlink()
    async with serving(folder) as (engine, _):
        assert not engine.capabilities.multimodal
        assert len((await run(engine, asked("r", (5, 6)))).token_ids) == 12


def test_recent_values_are_bounded() -> None:
    kept = RecentValues[str, bytes](10, len)
    for name in "abc":
        assert kept.find_or_make(name, lambda: bytes(4)) == bytes(4)
    assert kept.find_or_make("b", lambda: b"again") == bytes(4)
    assert kept.find_or_make("a", lambda: b"again") == b"again"
    kept.find_or_make("large", lambda: bytes(20))
    assert kept.nbytes == 20, "one that is too large replaces all others"
    kept.drop_values(lambda key: key == "none")
    assert kept.nbytes == 0
