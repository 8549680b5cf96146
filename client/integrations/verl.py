"""verl's LLM server client over a pool, and the settings that say which pool it is.

`VerlClient` has the method of verl's `LLMServerClient` (`generate`), so that its agent loops run over
our pools; Ray carries it to their processes. `verl_rollout` has the other half, `BaseRollout`. Both read
the section `custom.pool` of verl's rollout configuration. Whatever verl asks for that a pool can't do
raises an error; nothing is dropped silently. Partial rollouts are left to the pool: `generate` returns
only whole outputs.

Nothing of verl is imported here; `verl_plugin` and `verl_agents` do that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from rollout_client.generating.generate_options import GenerateOptions
from rollout_client.generating.settings import DEFAULT_DEADLINE_SECONDS
from rollout_client.pool import AsyncRolloutPool
from rollout_client.steering.control_ports import DirectOptions
from rollout_client.steering.pushing.routes import TRANSPORTS, Transport
from rollout_client.steering.version_folder import DEFAULT_KEPT_VERSIONS
from rollout_common.wire import GenerateOutput, SamplingParams, StopReason, WorkerInfo

CONFIG_SECTION = "pool"
_SAME_NAMES = frozenset(SamplingParams.model_fields) - {"n", "top_k", "max_tokens"}
_STOP_REASONS = {StopReason.STOP: "completed", StopReason.LENGTH: "length"}


@dataclass(frozen=True)
class PoolSettings:
    """The section `custom.pool` of verl's rollout configuration: which pool, and where weights go.

    Attributes:
        name: Of the RolloutReplica; or, without an operator, `urls`.
        namespace: Of the RolloutReplica; default: as of `AsyncRolloutPool.from_cluster`.
        kubeconfig: Likewise.
        urls: Of the workers' data ports.
        control_urls: Of their control ports; default: port 8001 beside data port 8000.
        token_file: With the token of those control ports.
        transport: How weights get to the replicas: `auto`, `shm` or `tcp`, see `PushOptions`.
        folder: Where the first rank of the trainer also writes weights; default: nowhere, they are in
            the replicas' memory alone.
        mounted_at: The same folder as the workers see it; default: at the same place.
        keep: How many committed versions stay there.
        deadline_seconds: Of each generation; default: the pool's.
    """

    name: str | None = None
    namespace: str | None = None
    kubeconfig: str | None = None
    urls: Sequence[str] = ()
    control_urls: Sequence[str | None] | None = None
    token_file: str | None = None
    transport: Transport = "auto"
    folder: str | None = None
    mounted_at: str | None = None
    keep: int = DEFAULT_KEPT_VERSIONS
    deadline_seconds: float | None = None

    @classmethod
    def of(cls, config: Any) -> PoolSettings:
        """Return the settings in verl's rollout configuration.

        Raises:
            ValueError: They are missing, unknown, or name no pool.
        """
        section = (getattr(config, "custom", None) or {}).get(CONFIG_SECTION)
        if not isinstance(section, Mapping):
            raise ValueError(
                f"set actor_rollout_ref.rollout.custom.{CONFIG_SECTION}: which pool it is"
            )
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(section) - known):
            raise ValueError(
                f"custom.{CONFIG_SECTION} has {unknown}: known are {', '.join(sorted(known))}"
            )
        found = cls(**section)
        if bool(found.name) == bool(found.urls):
            raise ValueError(f"custom.{CONFIG_SECTION} must have either a name or urls")
        if found.transport not in TRANSPORTS:
            raise ValueError(
                f"custom.{CONFIG_SECTION}.transport must be one of {', '.join(TRANSPORTS)}, not {found.transport!r}"
            )
        return found

    def open(self) -> AsyncRolloutPool:
        """Return a pool for the loop that runs."""
        if self.name is not None:
            return AsyncRolloutPool.from_cluster(
                self.name, self.namespace, kubeconfig=self.kubeconfig
            )
        file = self.token_file
        token = None if file is None else lambda: Path(file).read_text().strip()
        controls = None if self.control_urls is None else list(self.control_urls)
        return AsyncRolloutPool.from_urls(
            list(self.urls), control_urls=controls, direct=DirectOptions(token=token)
        )


class _LoopPools:
    """One pool for each event loop that asks for it; only how to make it crosses processes."""

    def __init__(self, make: Callable[[], AsyncRolloutPool]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncRolloutPool] = (
            WeakKeyDictionary()
        )

    def __reduce__(self) -> tuple[type[_LoopPools], tuple[Callable[[], AsyncRolloutPool]]]:
        return type(self), (self._make,)

    def current_pool(self) -> AsyncRolloutPool:
        """Return the pool of the loop that runs."""
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            self._made[loop] = self._make()
        return self._made[loop]

    async def close(self) -> None:
        """Close the pool of the loop that runs."""
        if (pool := self._made.pop(asyncio.get_running_loop(), None)) is not None:
            await pool.close()


@dataclass
class TokenOutput:
    """verl's answer of `generate`, field by field.

    `log_probs` is None unless asked for. `extra_fields` has `global_steps`, `min_global_steps` and
    `max_global_steps`, the versions whose weights made the last, the oldest and the newest token,
    `num_cached_tokens`, and `weights`, spans that say which weights made which token.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class VerlClient:
    """A pool as verl's agent loops see it. May be pickled; each process opens the pool for itself.

    Args:
        make: Makes the pool; must be picklable if this is to be.
        prompt_length: As verl has it; with `response_length` the length of a conversation.
        response_length: Budget of an answer whose sampling parameters have none.
        deadline_seconds: Of each generation; None: the pool's.
        seed: Of every generation; None: each draws its own.
        ignore_eos: Of every generation that does not say.
    """

    tokenizer: Any = None
    """Set by verl where its traces are to show text."""

    def __init__(
        self,
        make: Callable[[], AsyncRolloutPool],
        *,
        prompt_length: int | None = None,
        response_length: int | None = None,
        deadline_seconds: float | None = None,
        seed: int | None = None,
        ignore_eos: bool = False,
    ) -> None:
        self._pools = _LoopPools(make)
        self._prompt_length = prompt_length
        self._response_length = response_length
        self._deadline_seconds = deadline_seconds
        self._seed = seed
        self._ignore_eos = ignore_eos
        self._info: WorkerInfo | None = None

    @classmethod
    def of(cls, config: Any) -> VerlClient:
        """Return the client for verl's rollout configuration (`actor_rollout_ref.rollout`)."""
        settings = PoolSettings.of(config)
        return cls(
            settings.open,
            prompt_length=config.prompt_length,
            response_length=config.response_length,
            deadline_seconds=settings.deadline_seconds,
            seed=config.seed if config.full_determinism else None,
            ignore_eos=config.ignore_eos,
        )

    async def close(self) -> None:
        """Close the pool of the loop that runs."""
        await self._pools.close()

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
        mm_processor_output: Sequence[Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Sample one answer; `request_id` is that of the conversation and keeps it on one replica.

        As verl's own servers do, it shortens a budget that does not fit into the model's length, and
        an engine without priorities gets none: verl numbers all samples of a batch.

        Raises:
            NotImplementedError: Images, video or audio were given.
            ValueError: A sampling parameter can't be sent, or the prompt fills the model's length.
            RequestError: See `AsyncRolloutPool.generate`.
        """
        media = {
            "image_data": image_data,
            "video_data": video_data,
            "audio_data": audio_data,
            "mm_processor_kwargs": mm_processor_kwargs,
            "mm_processor_output": mm_processor_output,
        }
        given = [name for name, value in media.items() if value is not None and len(value)]
        if given:
            raise NotImplementedError(f"workers take only token ids, not {', '.join(given)}")
        sampling, wants_logprobs = self._sampling_fields(sampling_params)
        pool = self._pools.current_pool()
        # At the first prompt replicas may still load: that takes as long as a generation may wait.
        wait = self._deadline_seconds or DEFAULT_DEADLINE_SECONDS
        info = self._info = self._info or await pool.info(seconds=wait)
        sampling["max_tokens"] = self._token_budget(sampling["max_tokens"], len(prompt_ids), info)
        options: GenerateOptions = {
            "session_id": request_id,
            "sampling": sampling,
            "logprobs": None if wants_logprobs else "none",
            "priority": priority if info.capabilities.priority else 0,
        }
        if self._deadline_seconds is not None:
            options["deadline_seconds"] = self._deadline_seconds
        result = await pool.generate(prompt_ids, **options)
        output = result.output
        return TokenOutput(
            token_ids=list(output.token_ids),
            log_probs=list(output.logprobs or ()) if wants_logprobs else None,
            stop_reason=_STOP_REASONS.get(output.stop_reason, str(output.stop_reason)),
            num_preempted=result.timing.preemptions,
            extra_fields={
                **_version_fields(output),
                "num_cached_tokens": result.usage.cached_tokens,
            },
        )

    def _token_budget(self, asked: int | None, prompt: int, info: WorkerInfo) -> int:
        """Return how many tokens may be sampled after a prompt of so many."""
        room = info.max_length - prompt
        if room < 1:
            raise ValueError(f"the prompt has {prompt} tokens, the model takes {info.max_length}")
        if asked is None and self._response_length is not None:
            asked = self._response_length
            if self._prompt_length is not None:
                asked = min(asked, max(1, self._prompt_length + asked - prompt))
        return room if asked is None else min(asked, room)

    def _sampling_fields(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
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
        if self._seed is not None:
            left.setdefault("seed", self._seed)
        left.setdefault("ignore_eos", self._ignore_eos)
        budget = next((b for b in budgets if b is not None), None)
        return {**left, "top_k": max(0, top_k), "max_tokens": budget}, wants


def _version_fields(output: GenerateOutput) -> dict[str, Any]:
    versions = [span.version for span in output.weights]
    found: dict[str, Any] = {"weights": [span.model_dump() for span in output.weights]}
    if versions:
        found |= {
            "global_steps": versions[-1],
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
        }
    return found
