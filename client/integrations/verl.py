"""verl's LLM server client over a pool, and the settings that say which pool it is.

`VerlClient` has the method of verl's `LLMServerClient` (`generate`), so that its agent loops run over
our pools; Ray carries it to their processes. `verl_rollout` has the other half, `BaseRollout`. Both
read the section `custom.pool` of verl's rollout configuration. A request that a pool can't fulfil
raises an error; nothing is dropped silently. `generate` returns only whole outputs.

This module does not import verl; `verl_plugin` and `verl_agents` do.
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
from rollout_client.steering.pushing.options import PushOptions
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
        name: The RolloutReplica's name; without an operator give `urls`.
        namespace: As for `AsyncRolloutPool.from_cluster`.
        kubeconfig: As for `AsyncRolloutPool.from_cluster`.
        urls: The workers' data ports.
        control_urls: Their control ports; default: port 8001 for data port 8000.
        token_file: File with the token of those control ports.
        transport: How weights get to the replicas: `auto`, `shm`, `tcp` or `nixl`, see `PushOptions`.
        folder: A folder to which the first rank also writes weights; default: only to the replicas'
            memory.
        mounted_at: Path of that folder in the workers; default: the same path.
        keep: How many committed versions stay there.
        deadline_seconds: Deadline of each generation; default: the pool's.
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
            raise ValueError(f"set actor_rollout_ref.rollout.custom.{CONFIG_SECTION}: name a pool")
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
        """Return a pool for the running loop."""
        if self.name is not None:
            kubeconfig = self.kubeconfig
            return AsyncRolloutPool.from_cluster(self.name, self.namespace, kubeconfig=kubeconfig)
        file = self.token_file
        token = None if file is None else lambda: Path(file).read_text().strip()
        controls = None if self.control_urls is None else list(self.control_urls)
        return AsyncRolloutPool.from_urls(
            list(self.urls), control_urls=controls, direct=DirectOptions(token=token)
        )

    def push_options(self) -> PushOptions:
        """Return the options with which weights are published."""
        options: PushOptions = {"cast": True, "transport": self.transport}
        if self.folder is not None:
            options |= {"spool": self.folder, "mounted_at": self.mounted_at, "keep": self.keep}
        return options


class LoopPools:
    """One pool for each event loop; a pickle has only the function that makes them."""

    def __init__(self, make: Callable[[], AsyncRolloutPool]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncRolloutPool]
        self._made = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[LoopPools], tuple[Callable[[], AsyncRolloutPool]]]:
        return type(self), (self._make,)

    def current_pool(self) -> AsyncRolloutPool:
        """Return the pool of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            self._made[loop] = self._make()
        return self._made[loop]

    async def close(self) -> None:
        """Close the pool of the running loop."""
        if (pool := self._made.pop(asyncio.get_running_loop(), None)) is not None:
            await pool.close()


@dataclass
class TokenOutput:
    """verl's answer of `generate`, field by field.

    `log_probs` is None unless asked for. `extra_fields` has `global_steps`, `min_global_steps` and
    `max_global_steps` (the versions of the last token, of the oldest and of the newest weights),
    `num_cached_tokens`, and `weights`, spans that say which weights made which token.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class VerlClient:
    """A pool for verl's agent loops. It may be pickled; each process opens a pool of its own.

    Args:
        make: Makes the pool; must be picklable for this to be.
        prompt_length: As in verl; with `response_length` the length of a conversation.
        response_length: Budget of an answer whose sampling parameters have none.
        deadline_seconds: Deadline of each generation; None: the pool's.
        seed: Seed of every generation; None: each draws its own.
        ignore_eos: For generations whose sampling parameters do not set it.
    """

    # Not a dataclass: verl passes it through Hydra, which would make a configuration of one.

    tokenizer: Any = None
    """verl sets it if its traces should show text."""

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
        self.prompt_length = prompt_length
        self.response_length = response_length
        self.deadline_seconds = deadline_seconds
        self.seed = seed
        self.ignore_eos = ignore_eos
        self._pools = LoopPools(make)
        self._info: WorkerInfo | None = None

    @classmethod
    def of(cls, config: Any) -> VerlClient:
        """Return the client for verl's rollout configuration (`actor_rollout_ref.rollout`)."""
        if getattr(config, "enable_rollout_routing_replay", False):
            raise ValueError(
                "rollout.enable_rollout_routing_replay is not supported over a pool: set it to false"
            )
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
        """Close the pool of the running loop."""
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
        """Sample one answer; `request_id` names the conversation and keeps it on one replica.

        Like verl's own servers it shortens a budget that exceeds the model's length. It sends no
        priority to an engine without priorities: verl numbers all samples of a batch.

        Raises:
            NotImplementedError: Images, video or audio were given.
            ValueError: A sampling parameter can't be sent, or the prompt fills the model's length.
            RequestError: See `AsyncRolloutPool.generate`.
        """
        media = {
            "image_data": image_data, "video_data": video_data, "audio_data": audio_data,
            "mm_processor_kwargs": mm_processor_kwargs, "mm_processor_output": mm_processor_output,
        }  # fmt: skip
        given = [name for name, value in media.items() if value is not None and len(value)]
        if given:
            raise NotImplementedError(f"workers take only token ids, not {', '.join(given)}")
        sampling, wants_logprobs = self._sampling_fields(sampling_params)
        pool = self._pools.current_pool()
        # Replicas may still load at the first prompt: wait as long as a generation may wait.
        wait = self.deadline_seconds or DEFAULT_DEADLINE_SECONDS
        info = self._info = self._info or await pool.info(seconds=wait)
        sampling["max_tokens"] = self._token_budget(sampling["max_tokens"], len(prompt_ids), info)
        options: GenerateOptions = {
            "session_id": request_id,
            "sampling": sampling,
            "logprobs": None if wants_logprobs else "none",
            "priority": priority if info.capabilities.priority else 0,
        }
        if self.deadline_seconds is not None:
            options["deadline_seconds"] = self.deadline_seconds
        result = await pool.generate(prompt_ids, **options)
        output = result.output
        return TokenOutput(
            token_ids=list(output.token_ids),
            log_probs=list(output.logprobs or ()) if wants_logprobs else None,
            stop_reason=_STOP_REASONS.get(output.stop_reason, str(output.stop_reason)),
            num_preempted=result.timing.preemptions,
            extra_fields=_version_fields(output)
            | {"num_cached_tokens": result.usage.cached_tokens},
        )

    def _token_budget(self, asked: int | None, prompt: int, info: WorkerInfo) -> int:
        """Return how many tokens may be sampled after a prompt of this length."""
        room = info.max_length - prompt
        if room < 1:
            raise ValueError(f"the prompt has {prompt} tokens, the model takes {info.max_length}")
        if asked is None and self.response_length is not None:
            asked = self.response_length
            if self.prompt_length is not None:
                asked = min(asked, max(1, self.prompt_length + asked - prompt))
        return room if asked is None else min(asked, room)

    def _sampling_fields(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        """Translate the names that verl takes from vLLM and SGLang; `given` stays unchanged."""
        left = {name: value for name, value in given.items() if value is not None}
        logprobs = left.pop("logprobs", False)
        if logprobs not in (True, False, 0, 1):
            raise ValueError(f"logprobs={logprobs!r}: only those of the sampled tokens exist")
        # In vLLM 0 asks for the logprob of the sampled token, without alternatives.
        wants = logprobs is not False
        if left.pop("n", 1) != 1:
            raise ValueError("n must be 1: verl repeats the prompts itself")
        budgets = [left.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
        top_k = left.pop("top_k", 0)
        unknown = sorted(set(left) - _SAME_NAMES)
        if unknown:
            raise ValueError(f"these sampling parameters can't be sent: {', '.join(unknown)}")
        if self.seed is not None:
            left.setdefault("seed", self.seed)
        left.setdefault("ignore_eos", self.ignore_eos)
        budget = next((b for b in budgets if b is not None), None)
        return {**left, "top_k": max(0, top_k), "max_tokens": budget}, wants


def _version_fields(output: GenerateOutput) -> dict[str, Any]:
    versions = [span.version for span in output.weights]
    found: dict[str, Any] = {"weights": [span.model_dump() for span in output.weights]}
    if versions:
        found["global_steps"] = versions[-1]
        found["min_global_steps"], found["max_global_steps"] = min(versions), max(versions)
    return found
