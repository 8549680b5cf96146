"""A program: keep a long conversation our way, verl's two ways, or not at all.

`python -m bench.baselines.conversations WAY TURNS TEXT|MEDIA|SANITY` prints one line of JSON. All
ways get the same tokenizer, template, answers and results. Time is the process's own CPU time, as
other programs may share the machine; memory is the peak resident size above what the prepared input
took.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from chatstyles import tokenizer

TOKENS = 240
IMAGES = 16
WORDS = (
    *("sum", "seven", "twelve", "result", "call", "degrees", "numbers", "words"),
    *("answers", "helpful", "what", "the", "of", "and"),
)
ASKED = {"role": "user", "content": "what is the sum of seven and twelve?"}
LONG = 10**7
CALL = {"id": "call", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


class Step(NamedTuple):
    """An answer, and the result of the call in it."""

    text: str
    ids: list[int]
    logprobs: list[float]
    result: str
    images: list[Any]


class Kept(NamedTuple):
    """A way at work: what a turn does, what the end does, how many ids there are."""

    turn: Callable[[Step], None]
    end: Callable[[], None]
    length: Callable[[], int]


def steps(turns: int, media: bool) -> list[Step]:
    """Return the same turns every time, with 16 pictures among them if media are asked for."""
    rng, tok = random.Random(7), tokenizer("qwen")
    found = []
    for turn in range(turns):
        text = " ".join(rng.choices(WORDS, k=TOKENS))
        ids = [*tok.encode(text, add_special_tokens=False)[:TOKENS], tok.eos_token_id]
        result = " ".join(rng.choices(WORDS, k=TOKENS))
        images = [_picture(turn)] if media and turn % max(1, turns // IMAGES) == 0 else []
        said = tok.decode(ids[:-1])
        found.append(Step(said, ids, [-0.5] * len(ids), result, images))
    return found


def _picture(seed: int) -> Any:
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (224, 308, 3), np.uint8))


def processing(media: bool) -> Any:
    """Return the tokenizer, or transformers' own Qwen2-VL processor around it."""
    if not media:
        return tokenizer("qwen")
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    class Plain(Qwen2VLProcessor):  # type: ignore[misc]
        """verl hands its message models to the template, and takes every key for media."""

        def __call__(self, *args: Any, **options: Any) -> Any:
            found = super().__call__(*args, **options)
            found.pop("mm_token_type_ids", None)
            return found

        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            plain = [
                m if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in messages
            ]
            return super().apply_chat_template(plain, **options)

    tok = tokenizer("qwen")
    return Plain(
        image_processor=Qwen2VLImageProcessor(), tokenizer=tok,
        video_processor=Qwen2VLVideoProcessor(), chat_template=tok.chat_template,
    )  # fmt: skip


def ours(media: bool, sanity: bool) -> Kept:
    """This project's request, with logprobs and weights, which verl's request does not keep."""
    from rollout_worker.schemas import RolloutRequest, ToolResponse, WeightsSpan

    source = processing(media)
    request = RolloutRequest.from_messages(
        [ASKED], source, max_prompt_len=1000, max_response_len=LONG, max_model_len=LONG,
        tokenization_sanity_check_mode="strict" if sanity else "disable",
    )  # fmt: skip
    spans = [WeightsSpan(epoch=1, version=1, start=0, end=TOKENS + 1)]

    def turn(step: Step) -> None:
        request.get_generation_prompt_ids(source)
        request.add_assistant_message(
            source, step.text, step.ids, logprobs=step.logprobs, weights=spans
        )
        tool = ToolResponse(text=step.result, image=step.images or None)
        request.add_tool_response_messages(source, [tool])

    return Kept(turn, lambda: request.finalize(source), lambda: len(request.input_ids))


def verl_request(media: bool, sanity: bool) -> Kept:
    """Verl's AsyncRolloutRequest."""
    import torch
    from verl.tools.schemas import ToolResponse
    from verl.workers.rollout.schemas import AsyncRolloutRequest

    source = processing(media)
    request = AsyncRolloutRequest(
        request_id="r", state="running", messages=[ASKED], processing_class=source,
        max_prompt_len=1000, max_response_len=LONG, max_model_len=LONG, reward_scores={},
        use_inference_chat_template=False,
        tokenization_sanity_check_mode="strict" if sanity else "disable",
    )  # fmt: skip

    def turn(step: Step) -> None:
        request.get_generation_prompt_ids(source)
        ids = torch.tensor([step.ids])
        request.add_assistant_message(source, step.text, content_ids=ids)
        parts: dict[str, Any] = {"image": step.images} if step.images else {}
        request.add_tool_response_messages(source, [ToolResponse(text=step.result, **parts)])

    return Kept(turn, lambda: request.finalize(source, {}), lambda: request.input_ids.shape[-1])


def verl_builder(media: bool, sanity: bool) -> Kept:
    """Verl's continuous-token builder, as its agent loop calls it."""
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    if media or sanity:
        raise SystemExit("the builder is measured with text only: it checks nothing")
    builder = create_continuous_token_builder(processing(media), hf_model_type="qwen2")
    messages: list[dict[str, Any]] = [ASKED]
    state: dict[str, Any] = {"ids": builder.build_initial_tokens(messages), "mask": [], "logs": []}

    def align(merged: Any, logprobs: list[float] | None) -> None:
        state["ids"] = merged.token_ids
        state["mask"], state["logs"] = builder.align_response_metadata(
            merged, state["mask"], state["logs"], assistant_logprobs=logprobs
        )

    def turn(step: Step) -> None:
        align(builder.merge_assistant_tokens(state["ids"], step.ids), step.logprobs)
        messages.append({"role": "assistant", "content": step.text})
        before = list(messages)
        messages.append({"role": "tool", "content": step.result})
        align(builder.merge_context_tokens(before, messages, state["ids"]), None)

    return Kept(turn, lambda: None, lambda: len(state["ids"]))


def libraries(media: bool, sanity: bool) -> Kept:
    """No conversation at all: tokenize each result once, make each picture's pixels and keep them."""
    source = processing(media)
    tok = source.tokenizer if media else source
    pixels: list[Any] = []
    count = 0

    def turn(step: Step) -> None:
        nonlocal count
        count += len(tok.encode(step.result, add_special_tokens=False))
        if step.images:
            pixels.append(source.image_processor(images=step.images, return_tensors="pt"))

    return Kept(turn, lambda: None, lambda: count)


WAYS = {
    "libraries": libraries,
    "ours": ours,
    "verl-request": verl_request,
    "verl-builder": verl_builder,
}


def measure(way: str, turns: int, kind: str) -> dict[str, float]:
    """Return the seconds in all, of an early and a late turn, of the end; MiB; and tokens."""
    kept = WAYS[way](kind == "MEDIA", kind == "SANITY")
    work = steps(turns, kind == "MEDIA")
    kept.turn(work[0])  # whatever is loaded or compiled only once
    Path("/proc/self/clear_refs").write_text("5")
    before, each = _memory("VmRSS"), []
    for step in work[1:]:
        began = time.process_time()
        kept.turn(step)
        each.append(time.process_time() - began)
    began = time.process_time()
    kept.end()
    end = time.process_time() - began
    text = [t for t, step in zip(each, work[1:], strict=True) if not step.images]
    tenth = max(1, len(text) // 10)
    return {
        "total": sum(each) + end,
        "first": statistics.median(text[:tenth]),
        "last": statistics.median(text[-tenth:]),
        "end": end,
        "memory": _memory("VmHWM") - before,
        "tokens": kept.length(),
    }


def _memory(name: str) -> float:
    def lines() -> Iterator[str]:
        yield from Path("/proc/self/status").read_text().splitlines()

    return next(int(line.split()[1]) / 1024 for line in lines() if line.startswith(name))


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
