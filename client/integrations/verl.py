"""verl's rollout interfaces over a pool: its LLM server client and its rollout base.

`VerlRollout` has the methods of verl's `LLMServerClient` (`generate`) and `BaseRollout` (`resume`,
`update_weights`, `release`), so that its agent loops run over our pools. Whatever verl asks for that
a pool can't do raises an error; nothing is dropped silently. Partial rollouts are left to the pool:
`generate` returns only whole outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_client.pool import AsyncRolloutPool
from rollout_client.steering.spool import SHARD_BYTES, drain, spool
from rollout_worker.schemas import GenerateOutput, SamplingParams, StopReason

if TYPE_CHECKING:
    from rollout_client.steering.spool import Tensors

TAGS = ("weights", "kv_cache")
_SAME_NAMES = frozenset(SamplingParams.model_fields) - {"n", "top_k", "max_tokens"}
_STOP_REASONS = {StopReason.STOP: "completed", StopReason.LENGTH: "length"}


@dataclass
class TokenOutput:
    """verl's answer of `generate`, field by field.

    `log_probs` is None unless asked for. `extra_fields` has `global_steps`, `min_global_steps` and
    `max_global_steps`, the steps whose weights made the last, the oldest and the newest token, and
    `weights`, spans that say which weights made which token.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class VerlRollout:
    """One pool as verl sees it.

    Args:
        pool: Used in the caller's loop, and not closed here.
        folder: Where this process writes weights, on a volume that the workers mount.
        mounted_at: The same folder as the workers see it.
        is_leader: True for exactly one of all trainer ranks: it writes and publishes, the others
            only take the tensors.
        response_length: Budget of an answer whose sampling parameters have none.
        shard_bytes: Size of the files that weights are written to.
    """

    def __init__(
        self,
        pool: AsyncRolloutPool,
        *,
        folder: Path,
        mounted_at: str,
        is_leader: bool = True,
        response_length: int | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self._pool = pool
        self._folder = folder
        self._mounted_at = mounted_at.rstrip("/")
        self._leads = is_leader
        self._response_length = response_length
        self._shard_bytes = shard_bytes
        self._version = 0
        self._steps: dict[tuple[int, int], int] = {}

    # The LLM server client.

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Sample one answer; `request_id` is that of the conversation and keeps it on one replica.

        Raises:
            NotImplementedError: Images, video or audio were given.
            ValueError: A sampling parameter can't be sent; the message names it.
            RequestError: See `AsyncRolloutPool.generate`.
        """
        media = {"image_data": image_data, "video_data": video_data, "audio_data": audio_data}
        given = [name for name, value in {**media, "mm": mm_processor_kwargs}.items() if value]
        if given:
            raise NotImplementedError(f"workers take only token ids, not {', '.join(given)}")
        sampling, wants_logprobs = self._sampling(sampling_params)
        result = await self._pool.generate(
            prompt_ids,
            session_id=request_id,
            sampling=sampling,
            logprobs=None if wants_logprobs else "none",
            priority=priority,
        )
        output = result.output
        return TokenOutput(
            token_ids=list(output.token_ids),
            log_probs=list(output.logprobs or ()) if wants_logprobs else None,
            stop_reason=_STOP_REASONS.get(output.stop_reason, str(output.stop_reason)),
            num_preempted=result.timing.preemptions,
            extra_fields=self._facts(output),
        )

    def _sampling(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Translate verl's (vLLM's and SGLang's) names; the caller's mapping is not changed."""
        left = {name: value for name, value in given.items() if value is not None}
        logprobs = left.pop("logprobs", False)
        if logprobs not in (True, False, 0, 1):
            raise ValueError(f"logprobs={logprobs!r}: there are only those of the sampled tokens")
        # vLLM's 0 asks for that of the sampled token, without alternatives.
        wants = logprobs is not False
        if left.pop("n", 1) != 1:
            raise ValueError("n must be 1: verl repeats the prompts itself")
        budgets = [left.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
        top_k = left.pop("top_k", 0)
        unknown = sorted(set(left) - _SAME_NAMES)
        if unknown:
            raise ValueError(f"these sampling parameters can't be sent: {', '.join(unknown)}")
        budget = next((b for b in [*budgets, self._response_length] if b is not None), None)
        return {**left, "top_k": max(0, top_k), "max_tokens": budget}, wants

    def _facts(self, output: GenerateOutput) -> dict[str, Any]:
        spans = output.weights
        steps = [self._steps.get((s.epoch, s.version), s.version) for s in spans]
        found: dict[str, Any] = {"weights": [span.model_dump() for span in spans]}
        if steps:
            found["global_steps"] = steps[-1]
            found["min_global_steps"], found["max_global_steps"] = min(steps), max(steps)
        return found

    # The rollout base.

    async def resume(self, tags: Sequence[str]) -> None:
        """Wake the pool once `kv_cache` is asked for.

        With `weights` alone there is nothing to do: new weights are published to a sleeping pool and
        loaded as it wakes, so memory is taken only after the trainer has freed its own.
        """
        unknown = sorted(set(tags) - set(TAGS))
        if unknown:
            raise ValueError(f"unknown tags {unknown}: use {', '.join(TAGS)}")
        if self._leads and "kv_cache" in tags:
            await self._pool.wake()

    async def release(self) -> None:
        """Put the pool to sleep."""
        if self._leads:
            await self._pool.sleep()

    async def update_weights(
        self,
        weights: Tensors,
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: object | None = None,
        base_sync_done: bool = True,
    ) -> None:
        """Take all tensors on every rank; the leader writes and publishes them.

        Args:
            weights: Plain or asynchronous generator of (name, tensor), each a whole parameter.
            wire_format: Only `named_tensors`.
            global_steps: The trainer's step; becomes the version if that makes it rise.
            peft_config: Not supported: merge adapters first.
            base_sync_done: As verl passes it; without an adapter it has no meaning.

        Raises:
            NotImplementedError: Another wire format, or an adapter. All tensors were taken.
            PublishError: See `AsyncRolloutPool.publish_weights`.
        """
        if wire_format != "named_tensors" or peft_config is not None:
            await drain(weights)
            what = "adapters" if peft_config is not None else f"wire_format {wire_format!r}"
            raise NotImplementedError(f"{what} can't be sent: send whole named tensors")
        if not self._leads:
            await drain(weights)
            return
        if self._pool.epoch is None:
            await self._pool.acquire()
        version = max(self._version + 1, global_steps or 0)
        name = f"epoch-{self._pool.epoch}-version-{version}"
        await spool(weights, self._folder / name, self._shard_bytes)
        self._version = version
        path = f"{self._mounted_at}/{name}" if self._mounted_at else name
        done = await self._pool.publish_weights(version, path)
        if global_steps is not None:
            self._steps[done.identity.as_tuple()] = global_steps
