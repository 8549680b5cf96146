"""Which bytes of pictures go to which worker, and what a caller may pass as a picture."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import Any

import pytest

from rollout_client.generating.generate_options import make_request
from rollout_client.generating.sent_pictures import (
    SentPictures,
    split_pictures,
    with_picture_data,
)
from rollout_common.wire import MAX_IMAGE_BYTES, MAX_IMAGES, GenerateRequest

A, B = b"picture a", b"picture b"


def ref(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a_request_keeps_hashes_and_gets_bytes_back() -> None:
    request, texts = split_pictures(make_request([1], {"images": [A, B, A]}))
    assert texts == {ref(A): text(A), ref(B): text(B)}
    assert request.multimodal is not None
    assert [each.ref for each in request.multimodal.images] == [ref(A), ref(B), ref(A)]
    some = with_picture_data(request, {ref(A): texts[ref(A)]})
    assert some.model_dump(exclude_none=True)["multimodal"]["images"] == (
        {"data": text(A)},
        {"ref": ref(B)},
        {"ref": ref(A)},
    ), "a worker needs the bytes once"


def test_a_whole_request_may_have_bytes_hashes_or_neither() -> None:
    images = [{"data": text(A)}, {"ref": ref(B)}, {"data": "no base64!"}]
    given = {"token_ids": [1], "multimodal": {"images": images}}
    whole = GenerateRequest.model_validate(given)
    request, texts = split_pictures(make_request(whole, {"priority": 3}))
    assert request.priority == 3
    assert list(texts) == [ref(A)]
    assert request.multimodal is not None
    assert request.multimodal.images[2].data == "no base64!", "the worker says what is wrong"
    assert split_pictures(make_request([1], {})) == (make_request([1], {}), {})
    assert make_request([1], {"images": []}).multimodal is None


@pytest.mark.parametrize(
    ("images", "error", "words"),
    [
        (b"picture", TypeError, "list of encoded pictures"),
        (["a.png"], TypeError, r"images\[0\] is a str"),
        ([A, 5], TypeError, r"images\[1\] is a int"),
        ([bytes(MAX_IMAGE_BYTES + 1)], ValueError, r"images\[0\] has"),
        ([bytes(MAX_IMAGE_BYTES)] * 4, ValueError, "together"),
        ([A] * (MAX_IMAGES + 1), ValueError, "multimodal.images"),
        ([b""], ValueError, r"multimodal.images.0.data"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_what_is_no_picture_is_refused_here(images: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        make_request([1], {"images": images})


async def test_others_wait_until_a_worker_has_the_picture() -> None:
    sent, order = SentPictures(), []
    go = asyncio.Event()

    async def send(name: str, refs: str, *, taken: bool) -> None:
        async with sent.claim_pictures("x", list(refs), 20) as claim:
            order.append((name, "".join(sorted(claim.missing))))
            if name == "first":
                await go.wait()
            if taken:
                claim.note_taken()

    tasks = [asyncio.create_task(send("first", "a", taken=False))]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(send(each, "ba", taken=True)) for each in ("second", "third")]
    tasks.append(asyncio.create_task(send("other", "c", taken=True)))
    await asyncio.sleep(0.01)
    assert order == [("first", "a"), ("other", "c")]
    go.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert order[2:] == [("second", "ab"), ("third", "")], (
        "one of them sends what the first did not"
    )


async def test_nobody_waits_long_for_another_one() -> None:
    sent = SentPictures()
    async with sent.claim_pictures("x", ["a"], 10):
        async with asyncio.timeout(5), sent.claim_pictures("x", ["a"], 0.02) as claim:
            assert claim.missing == {"a"}
            claim.note_taken()
        async with sent.claim_pictures("x", ["a"], 0.02) as claim:
            assert claim.missing == set()


async def test_what_is_remembered_is_bounded() -> None:
    sent = SentPictures(2)
    for name in "abc":
        async with sent.claim_pictures("x", [name], 10) as claim:
            claim.note_taken()
    async with sent.claim_pictures("x", ["a", "b", "c"], 10) as claim:
        assert claim.missing == {"a"}
