"""Plain transformers as the judge: one sequence at a time, its own cache and processors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation import logits_process

from rollout_worker.schemas import SamplingParams


class Reference:
    """A model folder as transformers itself runs it."""

    def __init__(self, folder: Path, attention: str = "sdpa", device: str = "cpu") -> None:
        transformers.utils.logging.disable_progress_bar()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), attn_implementation=attention
        )
        self.model = model.eval().to(device)
        self._known: dict[tuple[int, ...], list[int]] = {}

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """Return the logits [T, V] that each token of an output was drawn from."""
        ids = torch.tensor([[*prompt, *output]], device=self.model.device)
        logits: torch.Tensor = self.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return logits.float()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the greedy continuation; what was asked for before is remembered."""
        known = self._known.get(tuple(prompt), [])
        if len(known) < count:
            known = self._known[tuple(prompt)] = self._continued(prompt, count)
        return known[:count]

    @torch.no_grad()
    def _continued(self, prompt: Sequence[int], count: int) -> list[int]:
        """Continue token by token with transformers' own cache."""
        found: list[int] = []
        feed, cache = list(prompt), None
        for _ in range(count):
            ids = torch.tensor([feed], device=self.model.device)
            step = self.model(ids, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            feed = [int(step.logits[0, -1].argmax())]
            found += feed
        return found

    def raw_logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """Return the model's own log-probability of each token of an output."""
        logprobs = self.logits(prompt, output).log_softmax(-1)
        chosen = torch.tensor(output, device=logprobs.device).unsqueeze(1)
        return logprobs.gather(1, chosen).squeeze(1).tolist()

    def sampling_logprobs(
        self, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams
    ) -> list[float]:
        """Return the log-probability of each token under the distribution it is drawn from."""
        logits = self.logits(prompt, output).cpu()
        found = []
        for index, token in enumerate(output):
            row = distribution(logits[index], prompt, output[:index], sampling)
            found.append(float(row[token]))
        return found


def distribution(
    logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams
) -> torch.Tensor:
    """Return the log-probabilities [V] of the next token, as the schema defines them."""
    row = logits.clone()
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    if sampling.allowed_token_ids is not None:
        banned = torch.ones(len(row), dtype=torch.bool)
        banned[list(sampling.allowed_token_ids)] = False
        row[banned] = -torch.inf
    seen = torch.tensor([[*prompt, *output]])
    penalty = logits_process.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
    row = penalty(seen, row.unsqueeze(0))[0]
    for token in set(output):
        row[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    if len(output) < sampling.min_tokens:
        row[list(sampling.stop_token_ids)] = -torch.inf
    if sampling.temperature > 0:
        row = _truncated(row / sampling.temperature, sampling)
    return row.log_softmax(-1)


def _truncated(row: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    none = torch.zeros((1, 0), dtype=torch.long)
    scores = row.unsqueeze(0)
    if sampling.min_p > 0:
        scores = logits_process.MinPLogitsWarper(sampling.min_p)(none, scores)
    if sampling.top_k > 0:
        scores = logits_process.TopKLogitsWarper(sampling.top_k)(none, scores)
    if sampling.top_p < 1:
        scores = logits_process.TopPLogitsWarper(sampling.top_p)(none, scores)
    return scores[0]
