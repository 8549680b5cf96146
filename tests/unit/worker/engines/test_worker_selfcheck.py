"""What a checkpoint that is loaded as an update tells of an engine."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from rollout_worker.engine import EngineDelta, EngineError, EngineRequest, WeightsRejected
from rollout_worker.engines import selfcheck
from rollout_worker.engines.selfcheck import UpdateProbe, check_update, find_difference
from rollout_worker.engines.sglang import model
from rollout_worker.engines.tested import SELF_CHECK_FLAG
from rollout_worker.schemas import AbortReason, Progress, StopReason


@dataclass
class Made:
    """An engine whose tokens follow from the prompt, and what an update makes of its logprobs."""

    shift: float = 0.0
    ends: bool = False
    updated: bool = False
    asked: list[EngineRequest] = field(default_factory=list)

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        self.asked.append(request)
        off = self.shift if self.updated else 0.0
        for at in range(request.sampling.max_tokens or 0):
            last = at + 1 == request.sampling.max_tokens
            yield EngineDelta(
                (request.token_ids[at % len(request.token_ids)],),
                (-1.0 - at + off,),
                (),
                stop_reason=StopReason.LENGTH if last else None,
            )
            if self.ends:
                yield EngineDelta(
                    (), (), (), stop_reason=StopReason.ABORTED, abort_reason=AbortReason.ENGINE
                )
                return

    async def reload(self) -> None:
        self.updated = True


def probe(made: Made, *, vocab: int = 5000, max_length: int = 512) -> UpdateProbe:
    return UpdateProbe(made.generate, vocab, max_length, "sampling")


def told(_: Progress) -> None: ...


@pytest.mark.parametrize("shift", [0.0, 0.05])
async def test_an_engine_that_updates_right_passes_and_is_asked_once_a_process(
    shift: float,
) -> None:
    made = Made(shift)
    await check_update(probe(made), made.reload, told, ("right", shift))
    assert made.updated
    count = len(made.asked)
    assert count == 2 * selfcheck.PROMPTS
    assert len({request.cache_salt for request in made.asked}) == count, "no prefix is shared"
    await check_update(probe(made), made.reload, told, ("right", shift))
    assert len(made.asked) == count


@pytest.mark.parametrize("shift", [0.3, -2.0, float("nan")])
async def test_an_engine_that_serves_other_numbers_after_it_is_refused(shift: float) -> None:
    made = Made(shift)
    with pytest.raises(EngineError, match=rf"token 0 of output 0 .*{SELF_CHECK_FLAG}=off"):
        await check_update(probe(made), made.reload, told, "wrong")


async def test_what_it_says_when_it_fails_is_told() -> None:
    made = Made()

    async def refuse() -> None:
        raise WeightsRejected("Online weight updates are not supported")

    with pytest.raises(EngineError, match="Online weight updates are not supported") as refused:
        await check_update(probe(made), refuse, told, "refused")
    assert not isinstance(refused.value, WeightsRejected)


async def test_an_engine_that_dies_of_its_first_tokens_is_no_short_output() -> None:
    with pytest.raises(EngineError, match="first tokens"):
        await probe(Made(ends=True)).generate_outputs("before")


def test_two_tokens_as_likely_as_each_other_are_no_difference_but_at_the_first() -> None:
    old = [((1, 2, 3), (-0.1, -0.7, -0.2))]
    assert find_difference(old, [((1, 9, 8), (-0.1, -0.71, -5.0))]) is None
    assert find_difference(old, [((9, 2, 3), (-0.1, -0.7, -0.2))]) == (
        "output 0 began with token 1, now with 9"
    )


@pytest.mark.parametrize(("vocab", "max_length"), [(5000, 512), (8, 4), (2, 2)])
async def test_prompts_fit_the_model(vocab: int, max_length: int) -> None:
    made = Made()
    of = probe(made, vocab=vocab, max_length=max_length)
    await of.generate_outputs("before")
    if max_length > 3:
        await of.warm_up()
    for request in made.asked:
        assert max(request.token_ids) < vocab
        assert len(request.token_ids) + (request.sampling.max_tokens or 0) <= max_length


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("quantisation", "device", "refused"),
    [
        ({}, (10, 0), None),
        (BLOCKS, None, None),
        (BLOCKS, (8, 9), None),
        (BLOCKS, (9, 0), None),
        (BLOCKS, (8, 0), r"capability 8\.0 .*block-wise"),
        (BLOCKS, (10, 0), r"capability 10\.0 .*block-wise"),
        (BLOCKS, (12, 0), r"capability 12\.0"),
        ({"quant_method": "fp8"}, (9, 0), "weight_block_size"),
        ({"quant_method": "compressed-tensors"}, (9, 0), "compressed-tensors"),
        ({"quant_method": "modelopt"}, (9, 0), "modelopt"),
        ({"quant_method": "gptq"}, (9, 0), "gptq"),
        ({"quant_method": "mxfp4"}, (9, 0), "mxfp4"),
        ({"bits": 4}, (9, 0), "unknown"),
    ],
    ids=str,
)
def test_the_kinds_of_weights_that_sglang_updates_are_a_list(
    quantisation: dict[str, object], device: tuple[int, int] | None, refused: str | None
) -> None:
    why = model.update_refusal(quantisation, device)
    assert (why is None) == (refused is None)
    if refused is not None:
        assert re.search(refused, str(why)), why
