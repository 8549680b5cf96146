"""Requests with pictures at the data port: sent once, named later, refused with the field and the fix."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rollout_common.wire.problems import ProblemError
from rollout_worker.engine import EngineCrashed
from rollout_worker.pictures.picture import Picture, PictureStore, content_ref
from rollout_worker.ports.data_routes import make_data_app
from rollout_worker.requests.http_requests import data_body_limits
from rollout_worker.requests.part_preparation import WAITING_TEXT, PictureIntake
from rollout_worker.schemas import MAX_IMAGES, GenerateRequest, Multimodal
from tests.support.unit.asgi import Answer, call
from tests.support.unit.tiny_engine import ABLE, MAX_LENGTH
from tests.support.unit.tiny_worker import TinyWorker, tiny_worker

UNKNOWN_REF = "sha256:" + "0" * 64


def png(colour: str, width: int = 4) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, 4), colour).save(file, "PNG")
    return file.getvalue()


RED, BLUE = png("red"), png("blue")


def sent(data: bytes) -> dict[str, str]:
    return {"data": base64.b64encode(data).decode()}


def named(data: bytes) -> dict[str, str]:
    return {"ref": content_ref(data)}


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[TinyWorker]:
    able = ABLE.model_copy(update={"multimodal": True})
    async with tiny_worker(tmp_path, able=able) as made:
        made.engine.free = True
        yield made


async def ask(worker: TinyWorker, images: Any, **fields: Any) -> Answer:
    body = {"token_ids": [1], "sampling": {"max_tokens": 1}, "multimodal": {"images": images}}
    text = json.dumps({**body, **fields}).encode()
    return await call(make_data_app(worker.worker), "/v1/generate", text)


async def test_a_picture_is_sent_once_and_named_later(worker: TinyWorker) -> None:
    assert (await ask(worker, [sent(RED)])).status == 200
    assert (await ask(worker, [named(RED), sent(BLUE), named(BLUE)])).status == 200
    seen = [each.ref for each in worker.engine.prepared]
    assert seen == [content_ref(each) for each in (RED, RED, BLUE, BLUE)]
    first, second = worker.engine.prepared[:2]
    assert first is second, "one picture is in memory once"
    assert first.pixels == b"\xff\0\0" * 16


async def test_pictures_that_are_unknown_are_named(worker: TinyWorker) -> None:
    answer = await ask(worker, [sent(RED), named(BLUE), {"ref": UNKNOWN_REF}])
    assert (answer.status, answer.slug) == (409, "unknown-media")
    assert answer.body["refs"] == [content_ref(BLUE), UNKNOWN_REF]
    assert "data" in answer.body["detail"]
    assert worker.engine.prepared == []
    assert (await ask(worker, [named(RED)])).status == 200, "what came with the request is kept"


async def test_each_output_of_a_request_has_its_pictures(worker: TinyWorker) -> None:
    request = GenerateRequest.model_validate(
        {"token_ids": [1], "sampling": {"n": 3}, "multimodal": {"images": [sent(RED)]}}
    )
    parts = await worker.worker.prepare_parts(request)
    flight = worker.worker.submit_request(request, parts)
    assert [output.request.pictures for output in flight.outputs] == [parts.pictures] * 3
    await worker.ends(flight)


@pytest.mark.parametrize(
    ("images", "field"),
    [
        ([], "multimodal.images"),
        ([{}], "multimodal.images.0"),
        ([{**sent(RED), **named(RED)}], "multimodal.images.0"),
        ([{"ref": "0" * 64}], "multimodal.images.0.ref"),
        ([{"ref": UNKNOWN_REF.upper()}], "multimodal.images.0.ref"),
        ([sent(RED), {"url": "http://192.0.2.1/cat.png"}], "multimodal.images.1.url"),
        ([{"data": 5}], "multimodal.images.0.data"),
        ([{"data": ""}], "multimodal.images.0.data"),
        ([sent(RED)] * (MAX_IMAGES + 1), "multimodal.images"),
        ([sent(RED), sent(b"nonsense")], "multimodal.images.1.data"),
        ([{"data": "no base64"}], "multimodal.images.0.data"),
        ([sent(RED), sent(png("red", MAX_LENGTH + 1))], "multimodal.images"),
        ("picture.png", "multimodal.images"),
        (None, "multimodal.images"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(worker: TinyWorker, images: Any, field: str) -> None:
    answer = await ask(worker, images)
    assert answer.status == 422
    assert [each["field"] for each in answer.body["errors"]] == [field]


async def test_an_engine_without_pictures_refuses_them_before_it_looks(tmp_path: Path) -> None:
    async with tiny_worker(tmp_path) as worker:
        answer = await ask(worker, [sent(b"nonsense")])
        assert (answer.status, answer.slug) == (422, "unsupported")
        assert answer.body["errors"][0]["field"] == "multimodal"
        assert worker.worker.body_limits() == data_body_limits(MAX_LENGTH)


async def test_a_worker_that_does_not_serve_decodes_nothing(worker: TinyWorker) -> None:
    await worker.pause(mode="abort")
    assert (await ask(worker, [sent(b"nonsense")])).slug == "paused"
    await worker.resume()
    assert (await ask(worker, [sent(RED)])).status == 200


async def test_an_engine_that_dies_over_a_picture_is_replaced(worker: TinyWorker) -> None:
    async def die() -> None:
        worker.engine.die()
        raise EngineCrashed("the picture ended it")

    worker.engine.before["prepare_pictures"] = die
    assert (await ask(worker, [sent(RED)])).slug == "failed"
    await worker.is_replaced()
    worker.engine.free = True
    assert (await ask(worker, [named(RED)])).status == 200, "its pictures outlive the engine"


async def test_bodies_with_pictures_may_be_large(worker: TinyWorker) -> None:
    assert worker.worker.body_limits().size > 64 * 2**20
    noise = io.BytesIO()
    Image.effect_noise((64, 1600), 90).convert("RGB").save(noise, "PNG")
    ignored = noise.getvalue() + bytes(9 * 2**20)  # what follows the picture's end is not read
    assert (await ask(worker, [sent(ignored)])).status == 200


def asked(*images: dict[str, str]) -> Multimodal:
    return Multimodal.model_validate({"images": images})


async def test_pictures_in_flight_are_bounded() -> None:
    intake = PictureIntake(PictureStore(10, 90))
    held = await intake.read_pictures(asked(sent(RED), sent(BLUE)))
    with pytest.raises(ProblemError) as refused:
        await intake.read_pictures(asked(sent(png("green"))))
    assert (refused.value.slug, refused.value.retry_after) == ("queue-full", 1)
    assert await intake.read_pictures(asked(named(RED))) == held[:1]
    del held
    assert len(await intake.read_pictures(asked(sent(png("green"))))) == 1


class SlowStore(PictureStore):
    """Keeps pictures once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()
        self.taken: list[str] = []

    def keep_picture(self, picture: Picture) -> Picture:
        self.taken.append(picture.ref)
        self.begun.set()
        assert self.go.wait(10)
        return super().keep_picture(picture)


async def test_what_waits_to_be_decoded_is_bounded() -> None:
    """One slow picture, and as many behind it as may wait; the next caller is told to come again."""
    store = SlowStore()
    intake = PictureIntake(store)
    whole = asked(*[{"data": "QUJD" * 2**21}] * 16)  # 128 MiB of text
    slow = asyncio.create_task(intake.read_pictures(asked(sent(RED))))
    await asyncio.to_thread(store.begun.wait, 10)
    one = asyncio.create_task(intake.read_pictures(whole))
    await asyncio.sleep(0)
    assert WAITING_TEXT == 2 * 16 * 2**23, "the second request is one text too many"
    with pytest.raises(ProblemError) as refused:
        await intake.read_pictures(asked(*whole.model_dump()["images"], *[{"data": "QUJD"}]))
    assert refused.value.slug == "queue-full"
    store.go.set()
    assert len(await slow) == 1
    with pytest.raises(ProblemError, match=r"images\.0\.data"):
        await one
    assert len(await intake.read_pictures(asked(sent(BLUE)))) == 1, "there is room again"


async def test_a_caller_that_leaves_ends_the_decoding() -> None:
    store = SlowStore()
    intake = PictureIntake(store)
    task = asyncio.create_task(intake.read_pictures(asked(sent(RED), sent(BLUE))))
    await asyncio.to_thread(store.begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    store.go.set()
    assert len(await intake.read_pictures(asked(named(RED)))) == 1
    assert store.taken == [content_ref(RED)]
