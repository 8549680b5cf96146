"""What a caller gets: the worker's answer, joined over all attempts, and a report of each attempt."""

from __future__ import annotations

from typing import Literal

from rollout_common.wire import (
    GenerateOutput,
    GenerateResponse,
    LogprobsOf,
    PromptLogprobs,
    Seconds,
    TokenId,
    Usage,
    Wire,
)

Outcome = Literal["finished", "aborted", "refused", "broken", "moved"]
"""How an attempt ended; `moved`: the weights changed, and the caller wants one version."""


class AttemptReport(Wire):
    """One request to one worker."""

    request_id: str
    replica: str
    outcome: Outcome
    cause: str = ""
    """The abort reason, the problem's slug, or what broke; empty for `finished`."""
    tokens: int = 0
    """Number of tokens that it sampled."""
    seconds: Seconds


class GenerateResult(GenerateResponse):
    """The worker's answer, however many attempts and replicas it took.

    `outputs[i].token_ids: [T]`, `.logprobs: [T]`, `.weights`: spans that cover `[0, T)`. Usage
    counts every token once: the prompt as given, the outputs as returned. `timing` is the caller's.
    """

    session_id: str
    attempts: tuple[AttemptReport, ...] = ()

    @property
    def output(self) -> GenerateOutput:
        """The first output; the only one unless `n` was raised."""
        return self.outputs[0]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first output."""
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> tuple[float, ...] | None:
        """Logprobs of the first output, if asked for."""
        return self.outputs[0].logprobs


class ScoreResult(PromptLogprobs):
    """The scores of given tokens: token_ids [T], logprobs [T], `top_logprobs` [T][k] if asked for.

    They are the tokens at positions `[start, start + T)` of what was sent. The first one of all, at position 0,
    follows nothing: its logprob is None. `weights` computed all of them.
    """

    token_ids: tuple[TokenId, ...]
    logprobs_of: LogprobsOf
    usage: Usage
    attempts: tuple[AttemptReport, ...] = ()
