"""Before an engine serves: a warm-up, and a check that an update with its own checkpoint changes nothing.

What an engine packs or requantises when it loads may not survive an update: then the first commit kills it, or
it silently computes other numbers. An update with the checkpoint's own bytes shows both at the start.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass

from rollout_common.wire import LogprobsOf, Progress, SamplingParams, StopReason
from rollout_worker.engine import EngineCrashed, EngineDelta, EngineError, EngineRequest
from rollout_worker.engines.picture_model import PictureModel, banned_tokens
from rollout_worker.engines.tested import SELF_CHECK_FLAG
from rollout_worker.pictures.picture import Picture, content_ref

logger = logging.getLogger(__name__)

PROMPTS, PROMPT_TOKENS, TOKENS = 4, 24, 8
WARM_UP_TOKENS = 8192
"""Prompt of a warm-up: what engines compute in one piece by default."""
PICTURE_SIDE = 64
"""Of the picture that is tried, in pixels: models that scale make few tokens of it."""
MAX_LOGPROB_DIFFERENCE = 0.1
"""By how much a logprob may differ: the weights are the same, so only the order of sums does."""

Generate = Callable[[EngineRequest], AsyncIterator[EngineDelta]]
ProbeOutputs = Sequence[tuple[Sequence[int], Sequence[float]]]

_passed_checks: set[Hashable] = set()
"""What passed in this process: a restarted engine is the same as the one before."""


@dataclass(frozen=True, slots=True)
class UpdateProbe:
    """How to try a running engine: its `generate`, and the limits of its model."""

    generate: Generate
    vocab_size: int
    max_length: int
    logprobs: LogprobsOf
    pictures: PictureModel | None = None
    """How the model takes pictures: one is tried, too."""

    async def warm_up(self, tokens: int = WARM_UP_TOKENS) -> None:
        """Make a few tokens from a long prompt, so that no request waits for what is compiled lazily."""
        length = max(1, min(tokens, self.max_length - 2))
        sampling = SamplingParams(max_tokens=2, top_p=0.9, ignore_eos=True)
        await self._generate_one("warm-up", self._make_prompt(0, length), sampling)
        if self.pictures is not None:
            await self._look_at_picture("warm-up-picture", self.pictures, 2)

    async def generate_outputs(self, round_: str) -> ProbeOutputs:
        """Return greedy outputs of fixed prompts, each alone in its batch, without prefixes cached in another round."""
        room = max(1, min(TOKENS, self.max_length - 1))
        sampling = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)
        length = max(1, min(PROMPT_TOKENS, self.max_length - room))
        outputs = [
            await self._generate_one(
                f"self-update-{round_}-{i}", self._make_prompt(i, length), sampling
            )
            for i in range(PROMPTS)
        ]
        if self.pictures is not None:
            name = f"self-update-{round_}-picture"
            outputs.append(await self._look_at_picture(name, self.pictures, room))
        return outputs

    async def _look_at_picture(
        self, name: str, model: PictureModel, tokens: int
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return a greedy output about one small picture, the same each time; none if it does not fit."""
        pixels = bytes(at * at % 251 for at in range(3 * PICTURE_SIDE**2))
        picture = Picture(content_ref(pixels), PICTURE_SIDE, PICTURE_SIDE, pixels)
        count = model.count_tokens(PICTURE_SIDE, PICTURE_SIDE)
        left = min(tokens, self.max_length - count - 2)
        if left < 1:
            return (), ()
        prompt = (0, *[model.pad_id] * count, 1)
        sampling = SamplingParams(temperature=0, max_tokens=left, ignore_eos=True)
        return await self._generate_one(name, prompt, sampling, (picture,))

    def _make_prompt(self, number: int, length: int) -> tuple[int, ...]:
        """Return ids of the first thousand: later ones may be special tokens."""
        ids = min(self.vocab_size, 1000)
        made = ((number * 331 + i * 97 + i * i) % ids for i in range(length))
        banned = banned_tokens(self.pictures)
        return tuple(0 if token in banned else token for token in made)

    async def _generate_one(
        self,
        name: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        pictures: tuple[Picture, ...] = (),
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        tokens: list[int] = []
        logprobs: list[float] = []
        request = EngineRequest(
            name, prompt, sampling, self.logprobs, cache_salt=name, pictures=pictures
        )
        async for delta in self.generate(request):
            tokens += delta.token_ids
            logprobs += delta.logprobs or ()
            if delta.stop_reason is StopReason.ABORTED:
                raise EngineCrashed("the engine ended while it made its first tokens")
        return tuple(tokens), tuple(logprobs)


async def check_update(
    probe: UpdateProbe,
    reload: Callable[[], Awaitable[None]],
    report: Callable[[Progress], None],
    key: Hashable,
) -> None:
    """Load the checkpoint as an update, and check that the outputs of the idle engine do not change.

    `reload` loads the model's own checkpoint as a commit loads a version. A check that passed is not repeated under
    its `key`.

    Raises:
        EngineError: the engine can't update this model; the text says why and what to change.
    """
    if key in _passed_checks:
        return
    report(Progress(message="loading the checkpoint once more, as an update"))
    began = time.monotonic()
    before = await probe.generate_outputs("before")
    try:
        await reload()
        after = await probe.generate_outputs("after")
    except EngineError as error:
        raise _not_updatable_error(f"the attempt failed: {error}") from error
    why = find_difference(before, after)
    if why is not None:
        raise _not_updatable_error(
            f"its own checkpoint, loaded as an update, changes its outputs: {why}"
        )
    _passed_checks.add(key)
    logger.info(
        "the engine takes updates of this model", extra={"seconds": time.monotonic() - began}
    )


def find_difference(before: ProbeOutputs, after: ProbeOutputs) -> str | None:
    """Return how two rounds of outputs differ by more than the order of sums explains, None if they don't.

    Where two tokens are equally likely, an output may go on with either, so the rest is not compared.
    """
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        for at, (token, was, other, now) in enumerate(zip(*old, *new, strict=True)):
            if not (math.isfinite(now) and abs(was - now) <= MAX_LOGPROB_DIFFERENCE):
                return f"token {at} of output {number} had logprob {was:.4g}, now {now:.4g}"
            if token != other:
                if at == 0:
                    return f"output {number} began with token {token}, now with {other}"
                break
    return None


def _not_updatable_error(why: str) -> EngineError:
    return EngineError(
        f"this engine can't update this model's weights ({why}): use another engine or a checkpoint "
        f"that is not quantised, or add {SELF_CHECK_FLAG}=off to engine.args if its weights never change"
    )
