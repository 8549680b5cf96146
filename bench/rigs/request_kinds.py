"""Kinds of requests: what each adds to a plain one, and what its two servers need for it."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rollout_worker.pictures.picture_decoding import decode_picture
from tests.support.engine import tinymodels
from tests.support.engine.engine_kinds import engine_args
from tests.support.engine.lora_adapters import LORA_FLAGS, adapter_tensors, config_of, save_adapter
from tests.support.engine.picture_models import (
    PAD,
    VISION_END,
    VISION_START,
    PictureModels,
    encoded,
)

from .models import TINY
from .servers import Live

TOP = 20
STAGE_SECONDS = 120.0
PICTURES = 8
ADAPTER = "policy"
SCHEMA = {"type": "array", "items": {"type": "boolean"}, "minItems": 200}
"""No answer of 64 tokens can end it, so that all have one length."""

More = Mapping[str, Any] | Callable[[list[int]], Mapping[str, Any]]
"""What is merged into the body of a plain request, and into its objects one level below; or what makes that of its prompt."""


@dataclass(frozen=True, slots=True)
class RequestKind:
    """A kind, and what it adds to a plain request of each server.

    `theirs` None: its server does not take it as ids, and the kind is compared with our plain requests.
    """

    name: str
    ours: More
    theirs: More | None = None


@dataclass(frozen=True, slots=True)
class KindsOfModel:
    """Kinds of requests to one model, the first of them plain.

    `ours`, `theirs`: what is added to the command lines. `dropped`: what their server starts without.
    `prepare`: called with our worker before the first request.
    """

    model: Path
    kinds: Sequence[RequestKind]
    ours: Sequence[str] = ()
    theirs: Sequence[str] = ()
    dropped: Sequence[str] = ()
    prepare: Callable[[Live], None] | None = None


def merge_body(body: Mapping[str, Any], more: More, prompt: list[int]) -> dict[str, Any]:
    made = dict(body)
    for key, value in (more(prompt) if callable(more) else more).items():
        inner = made.get(key)
        made[key] = {**inner, **value} if isinstance(inner, Mapping) else value
    return made


def kinds_of(engine: str, home: Path) -> Iterator[KindsOfModel]:
    """Yield what is compared for an engine; models and adapters that are not there yet are made in `home`."""
    yield _text_kinds(engine)
    yield _adapter_kinds(engine, home / ADAPTER)
    yield _picture_kinds(engine, PictureModels(home, "qwen2_vl"))
    if engine != "vllm":  # its kernels of CPUs record no routes
        yield _expert_kinds(home / "experts")


_TOP: Mapping[str, More] = {
    "vllm": {"sampling_params": {"logprobs": TOP}},
    "sglang": {"top_logprobs_num": TOP},
}
_SCORED: Mapping[str, More] = {
    "vllm": {"sampling_params": {"prompt_logprobs": 0}},
    "sglang": {"logprob_start_len": 0},
}
_STRUCTURE: Mapping[str, More] = {
    "vllm": {"sampling_params": {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False}},
    "sglang": {"sampling_params": {"json_schema": json.dumps(SCHEMA), "ignore_eos": False}},
}


def _text_kinds(engine: str) -> KindsOfModel:
    top, structure = {"top_logprobs": TOP}, {"structured": {"json_schema": SCHEMA}}
    masks = {"return_sampling_mask": True, "sampling": {"top_k": 50}}
    kinds = (
        RequestKind("plain", {}, {}),
        RequestKind(f"top {TOP} of each position", top, _TOP[engine]),
        RequestKind("scored prompt", {"prompt_logprobs": True}, _SCORED[engine]),
        RequestKind("mask of each draw", masks),
        RequestKind(
            "JSON schema", {**structure, "sampling": {"ignore_eos": False}}, _STRUCTURE[engine]
        ),
    )
    # Their grammars need the tokenizer.
    return KindsOfModel(TINY.model(1), kinds, dropped=("--skip-tokenizer-init",))


def _adapter_kinds(engine: str, folder: Path) -> KindsOfModel:
    save_adapter(folder, adapter_tensors(TINY.model(1), 1), config_of())
    vllm = engine == "vllm"
    names, field = ("--lora-modules", "model") if vllm else ("--lora-paths", "lora_path")
    kinds = (
        RequestKind("plain, an adapter loaded", {}, {}),
        RequestKind("adapter", {"adapter": ADAPTER}, {field: ADAPTER}),
    )
    return KindsOfModel(
        TINY.model(1),
        kinds,
        ours=engine_args(*LORA_FLAGS[engine]),
        theirs=[*LORA_FLAGS[engine], names, f"{ADAPTER}={folder}"],
        prepare=lambda worker: load_adapter(worker, folder.parent),
    )


def load_adapter(worker: Live, version: Path) -> None:
    """Stage and commit a folder of adapters as version 1 of our worker.

    Raises:
        RuntimeError: it was refused, or is not staged within two minutes.
    """
    identity = {"epoch": 1, "version": 1}
    with httpx.Client(base_url=worker.control, timeout=STAGE_SECONDS, trust_env=False) as client:
        source = {"path": str(version)}
        _succeed(client.post("/v1/weights/stage", json={**identity, "source": source}))
        until = time.monotonic() + STAGE_SECONDS
        while (slot := client.get(f"{worker.url}/v1/weights").json()["staged"])[
            "phase"
        ] != "Staged":
            if slot["phase"] != "Staging" or time.monotonic() > until:
                raise RuntimeError(f"the adapter is not staged: {slot}")
            time.sleep(0.1)
        _succeed(client.post("/v1/weights/commit", json={**identity, "in_flight": "Abort"}))


def _succeed(answer: httpx.Response) -> None:
    if answer.is_error:
        raise RuntimeError(f"{answer.request.url.path}: {answer.text}")


def _picture_kinds(engine: str, models: PictureModels) -> KindsOfModel:
    """Groups of requests share a picture, as samples of one prompt do."""
    files = [encoded(number, 200, 200) for number in range(PICTURES)]
    counts = [models.judge(1).count(decode_picture(file)) for file in files]
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]

    def plain(prompt: list[int]) -> Mapping[str, Any]:
        return {"token_ids": _few_ids(prompt)}

    def ours(prompt: list[int]) -> Mapping[str, Any]:
        which = prompt[0] % PICTURES
        ids = [VISION_START, *[PAD] * counts[which], VISION_END, *_few_ids(prompt)]
        image = {"data": urls[which].partition(",")[2]}
        return {"token_ids": ids, "multimodal": {"images": [image]}}

    def theirs(prompt: list[int]) -> Mapping[str, Any]:
        ids, url = [VISION_START, PAD, VISION_END, *_few_ids(prompt)], urls[prompt[0] % PICTURES]
        return {"token_ids": ids, "content_parts": [{"type": "image_url", "url": url}]}

    # SGLang's own server finds no processor for such a model where its kernels of GPUs are missing.
    kinds = (
        RequestKind("plain, a model that sees", plain, plain if engine == "vllm" else None),
        RequestKind("one picture", ours, theirs if engine == "vllm" else None),
    )
    # Their processors need the tokenizer.
    return KindsOfModel(models.model(1), kinds, dropped=("--skip-tokenizer-init",))


def _few_ids(prompt: list[int]) -> list[int]:
    """Return a prompt in the small vocabulary of the model that sees."""
    return [3 + token % 400 for token in prompt]


def _expert_kinds(folder: Path) -> KindsOfModel:
    maker = tinymodels.script()
    maker.make_model(
        folder, 1, maker.Shape(hidden=64, intermediate=32, heads=2, experts=16, tied=False)
    )
    routes = {"return_routed_experts": True}
    kinds = (
        RequestKind("plain, a mixture of experts", {}, {}),
        RequestKind("routed experts", routes, routes),
    )
    flag = "--enable-return-routed-experts"
    return KindsOfModel(folder, kinds, ours=engine_args(flag), theirs=(flag,))
