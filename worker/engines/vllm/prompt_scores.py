"""Scores of a prompt on their way out of vLLM, as tensors.

vLLM would make Python objects of every number in the worker's event loop: of millions for a long prompt, which takes
seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rollout_common.wire import WeightsId
from rollout_worker.engine import EngineRequest
from rollout_worker.token_scores import PromptScores, TopTokens


class PromptTensors:
    """What vLLM's core sent: for positions 1 and later, the prompt's own token, then the most likely ones.

    token_ids, logprobs: [P - 1, 1 + k].
    """

    def __init__(self, token_ids: Any, logprobs: Any) -> None:
        self._token_ids, self._logprobs = token_ids, logprobs

    def take_scores(self, start: int, end: int) -> tuple[list[float], TopTokens | None]:
        """Return the logprobs of positions [start, end) with 0 < start, and the most likely tokens there."""
        values, ids = self._logprobs[start - 1 : end - 1], self._token_ids[start - 1 : end - 1]
        width = values.shape[1] - 1
        if not width:
            return values[:, 0].tolist(), None
        top = TopTokens(width)
        top.token_ids.frombytes(ids[:, 1:].int().contiguous().numpy().tobytes())
        top.logprobs.frombytes(values[:, 1:].float().contiguous().numpy().tobytes())
        return values[:, 0].tolist(), top


def keep_prompt_tensors() -> None:
    """Have vLLM hand over the scores of prompts as `PromptTensors`."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    def keep(processor: Any, tensors: Sequence[Any]) -> None:
        processor.prompt_logprobs = PromptTensors(tensors[0], tensors[1])

    LogprobsProcessor._update_prompt_logprobs = keep


def read_scores(
    request: EngineRequest,
    tensors: PromptTensors | None,
    weights: WeightsId,
    hidden: Collection[int] = (),
) -> PromptScores:
    """Return the scores that a request asks for, of no token in `hidden`; a prompt of one token has no tensors."""
    assert request.scored is not None
    start, end = request.scored
    first = max(1, start)
    values: list[float] = []
    top = None
    if end > first:
        assert tensors is not None, "vLLM scored no prompt"
        values, top = tensors.take_scores(first, end)
    found = PromptScores.from_computed(start, values, top, weights, request.top_logprobs)
    return found.without_tokens(request.token_ids, hidden)
