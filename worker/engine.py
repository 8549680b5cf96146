"""The contract between the worker and an inference engine, in one file because adapters are written from it.

The worker (`service.py`) owns everything that a trainer sees: lifecycle, holds, admission, version
floors, in-flight policies, authentication, and where the bytes of weights come from. An engine owns
the model: it makes tokens, stamps each with the weights that made it, gives memory for new weights,
and swaps them in at a step boundary. An adapter for another engine implements `Engine` and is added
to `ENGINES` below and to `create_engine` in `engines/__init__.py`; docs/engines.md describes it, and
`tests/contract` is what it has to pass.

All methods are called from one asyncio loop; none may block it. Unless stated otherwise a method is
idempotent and safe to call concurrently with running generations. A call that takes too long is
cancelled and the engine counts as dead; docs/engines.md lists the limits.

Errors::

    EngineError
    ├── InvalidRequest        the engine can't do what the request asks (a 4xx that names the field)
    ├── WeightsRejected       bytes that don't fit the model; names the tensor (old weights serve on)
    └── EngineCrashed         the engine is dead or in an unknown state; only a restart helps
        └── ProcessSpent      and no engine would work in this process any more: it has to end
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rollout_common.transfer.layout import ITEM_BYTES
from rollout_common.wire import (
    AbortReason,
    Capabilities,
    LogprobsOf,
    MemoryTag,
    Progress,
    Resident,
    SamplingParams,
    StopMatch,
    StopReason,
    StructuredOutput,
    WeightsId,
    WeightsSpan,
)

from .pictures.picture import Picture
from .replay_records import ExpertRoutes, TokenMasks
from .token_scores import PromptScores, TopTokens

ENGINES = ("hf", "vllm", "sglang")
"""The engines that have adapters; `engines.create_engine` makes them."""


class EngineError(Exception):
    """Base of everything an engine raises on purpose.

    Attributes:
        slug: The kind of problem, as in `wire.problems.KINDS`; None if the text says it all.
    """

    slug: str | None = None


class InvalidRequest(EngineError):
    """The request can't be served as asked; `field` is its path, the text says what to change."""

    def __init__(self, field_path: str, detail: str) -> None:
        super().__init__(detail)
        self.field = field_path


class WeightsRejected(EngineError):
    """These bytes are not weights of this model; `tensor` is the first that is wrong, if one is."""

    def __init__(self, detail: str, *, tensor: str | None = None) -> None:
        super().__init__(detail)
        self.tensor = tensor


class ContentMismatch(WeightsRejected):
    """These bytes have another root hash than their identity, or the bytes of other nodes."""

    slug = "content-mismatch"


class EngineCrashed(EngineError):
    """The engine can't continue; every running request ends as aborted with reason `engine`."""


class ProcessSpent(EngineCrashed):
    """What the engine shares with this process is damaged for good, as CUDA's context may be.

    Raised by `start` and `alive`; the worker ends its requests, and then its process.
    """


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output's text must match, checked: `source` as requested, `compiled` in llguidance's serialised form."""

    source: StructuredOutput
    compiled: str


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One output to generate. The service splits a request for `n` outputs, with a derived seed for each.

    `request_id`: no other request in flight has it. `token_ids`: [P] prompt. `logprobs`: which kind
    to record, None for none. `max_tokens` of `sampling` is resolved: prompt + max_tokens
    fit the model's length; without a `seed` the draw is random. With `max_tokens` 0 the prompt is only scored: the
    one delta has no token. `priority`: lower
    starts first. `session_id`: outputs with the same one should run on the same data-parallel rank; an
    engine with one rank ignores it.
    `streamed`: a client reads the stream; else tokens after the first may come several at a time.
    `scored`: positions [from, to) of the prompt to score, with its model's own distribution. `top_logprobs`: how many
    of the most likely tokens to record at each scored position and with each token, of the kind `logprobs`.
    `routed_from`: record the experts of all tokens from this position of the prompt on; None: of none. `masks`: record
    which tokens could be drawn. `grammar`: tokens that can't lead to a matching text are not drawn, and EOS only after one.
    `pictures`: of the prompt, in the order of its placeholders; the engine has been asked to prepare them. `adapter`:
    one of the active weights'; it is found again by name whenever the weights change. `outputs`: how many of the same
    request there are, which share a response.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    logprobs: LogprobsOf | None
    priority: int = 0
    cache_salt: str | None = None
    session_id: str | None = None
    streamed: bool = True
    scored: tuple[int, int] | None = None
    top_logprobs: int = 0
    grammar: Grammar | None = None
    routed_from: int | None = None
    masks: bool = False
    pictures: tuple[Picture, ...] = ()
    adapter: str | None = None
    outputs: int = 1


@dataclass(frozen=True, slots=True)
class EngineDelta:
    """New tokens of one output; the last one of an output carries `stop_reason`.

    `token_ids`: [d], may be empty in the last delta; `logprobs`: [d] natural logs if requested;
    `spans` count from the output's first token and cover exactly this delta: none if it is empty.
    `cached_tokens`: tokens of the prompt found in the prefix cache; `preemptions`: how often it lost its
    KV to others; of both, the greatest of all deltas counts. `queued_seconds`: how long the request
    waited in the engine before its first step, the same in every delta. `not_finite`: the weights whose
    logits were not finite, which aborted the output; `grammar_error`: why its grammar can't go on, which did. `top`: a row for each token, if requested.
    `prompt`: the scores of the prompt, if requested; in the first delta with a token, or in the only one.
    `routes`: the experts of the tokens that were read to make these, those of the prompt in the first delta with a token;
    the first to read a token counts, whatever weights read it again. `masks`: a row for each token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    spans: tuple[WeightsSpan, ...]
    stop_reason: StopReason | None = None
    stop_match: StopMatch | None = None
    abort_reason: AbortReason | None = None
    not_finite: WeightsId | None = None
    grammar_error: str | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    queued_seconds: float = 0.0
    top: TopTokens | None = None
    prompt: PromptScores | None = None
    routes: ExpertRoutes | None = None
    masks: TokenMasks | None = None

    @classmethod
    def of_abort(
        cls, request: EngineRequest, reason: AbortReason, queued_seconds: float = 0.0
    ) -> EngineDelta:
        """Return the last delta of an output that ends with the tokens that it has."""
        return cls(
            token_ids=(),
            logprobs=None if request.logprobs is None else (),
            spans=(),
            stop_reason=StopReason.ABORTED,
            abort_reason=reason,
            queued_seconds=queued_seconds,
        )


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype (safetensors' name, such as `BF16`) and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a version: its name in the checkpoint and what it is."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """The tensors of a version of a model's weights, by the names of its checkpoint.

    A version must have those of `required`, and may have those of `optional` (a tied output head, buffers that the
    model makes itself). `tied` maps such a head to the tensor that it must equal.
    """

    required: Mapping[str, TensorSpec]
    optional: Mapping[str, TensorSpec]
    tied: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine with its model loaded.

    `engine`: its name in `ENGINES`. `engine_version` begins with a digit. `model`: the folder.
    `eos_token_ids`: as of `model_folder.read_eos_ids`. `root_hash`: of the checkpoint that was loaded.
    `layout`: the worker checks each version against it before it asks for memory. `by_path`: other
    processes of the engine read `MappedWeights` by `handle`; an engine in this process reads its `view`.
    """

    engine: str
    engine_version: str
    model: str
    max_length: int
    eos_token_ids: frozenset[int]
    root_hash: str
    layout: WeightsLayout
    by_path: bool = True


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine: requests started, and which memory is resident.

    `running` counts the started requests and `running_ids` names them, frozen ones included: a commit ends
    these and leaves the queue alone. Every other request in flight counts as queued. `pinned_ids`
    names those that run on the weights before the active ones.
    """

    running: int
    resident: Resident
    running_ids: frozenset[str] = frozenset()
    pinned_ids: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MappedWeights:
    """Host memory that holds a version's tensors in the checkpoint's dtypes until `release` is called.

    `handle`: descriptor in this process, by which others read it; None: they can't, see
    `EngineInfo.by_path`. `starts`: where the bytes of each tensor begin. `release`:
    idempotent; the sink that took the memory calls it once nothing reads it any more. `view`: all of it, as
    mapped in this process; nothing writes to it.
    """

    handle: int | None
    size: int
    starts: Mapping[str, int]
    release: Callable[[], None]
    view: memoryview


@dataclass(frozen=True, slots=True)
class TrainerTensors:
    """The trainer's own tensors in this process (torch.Tensor by name), on any device.

    `copy`: the trainer changes them in place while they serve, so an engine may only copy them.
    `release`: idempotent; the sink that took them calls it once nothing reads them any more.
    """

    tensors: Mapping[str, Any]
    release: Callable[[], None]
    copy: bool = False


@dataclass(frozen=True, slots=True)
class LentTensors:
    """A version in the device memory of trainers' processes, which the engine's processes read from device to device.

    `open_lanes`: takes how many processes of the engine read it, each by a lane of its own; returns the path by which
    they get these (`engines/shared_memory/lent_reading.py`). `read_root`: waits until all of it was read, and returns its
    root hash. `layout`: what must come.
    """

    open_lanes: Callable[[int], str]
    read_root: Callable[[], Awaitable[str]]
    layout: WeightsLayout


HandedTensors = TrainerTensors | LentTensors
"""A version that a trainer on the same devices hands over, without sending bytes."""

GivenWeights = MappedWeights | TrainerTensors | LentTensors
"""Memory that already has the bytes of a version."""


class Sink(Protocol):
    """Memory of an engine for one more version; the worker fills it, `commit` makes it serve.

    `allocate`, `seal` and `close` may block and are called in threads, never two at once.
    """

    @property
    def slot(self) -> str:
        """Id under which the members of a gang open the same slot; empty without a gang."""

    @property
    def memory(self) -> Literal["host", "device"]:
        """Where `allocate`'s buffers are; device memory needs a transport that writes to it."""

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""

    @property
    def took(self) -> bool:
        """Whether it serves from the memory that was given, and releases it; else it does not touch it."""

    def allocate(self, entry: TensorEntry) -> memoryview | None:
        """Return a buffer of exactly this tensor's size, None if its value isn't needed.

        Called once for each entry of `open_slot`, in that order; each buffer is filled and released
        before the next call. A tensor that isn't needed is still hashed, unless its sender
        sent its hash without its bytes (`EngineMember.unread`).
        """

    def seal(self) -> None:
        """Mark everything as written and verified: the engine may read it."""

    def close(self) -> None:
        """Give the memory back, sealed or not. Idempotent; never touches serving weights.

        Works on the sink of an engine that has died or was stopped, too.
        """


class WeightsRefill(Protocol):
    """Reads the active weights again, for a `sleep` or `wake` that needs their bytes."""

    async def __call__(self, *, on_disk: bool = False) -> Sink:
        """Return a sealed sink of the same engine; the caller frees it.

        The worker calls `open_slot` (with `on_disk`), fills the sink and verifies its hash.

        Raises:
            WeightsRejected: their source no longer holds the active weights.
            EngineError: what `open_slot` raised.
        """


KvPolicy = Literal["keep", "recompute", "pin"]


@dataclass(frozen=True, slots=True)
class GangMembership:
    """One node's place in an engine that spans several nodes, each with one worker.

    `nodes`: how many there are; `rank`: of this one; rank 0 is the head. `leader`: host name or address
    of the head; `port`: the engine's own rendezvous there. `slots`: a private folder of this node,
    in which the entry named by a slot's id leads to that slot's bytes on this node. `in_part`: whether a
    node may have only the tensors that its ranks read (`EngineMember.unread`).
    """

    nodes: int
    rank: int
    leader: str
    port: int
    slots: Path
    in_part: bool = True


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """What a member has loaded; the fields are those of `EngineInfo`."""

    model: str
    root_hash: str
    layout: WeightsLayout


class EngineMember(Protocol):
    """The part of an engine on a node other than the head's; the head's part commands it.

    Called from one asyncio loop as `Engine` is, with the same errors. The worker stages each
    version on every node; the head's `commit`, `sleep` and `wake` reach all ranks by the engine's
    own means, and the ranks find the bytes by the slot's id.
    """

    async def start(self, report: Callable[[Progress], None]) -> MemberInfo:
        """Launch this node's ranks; returns once they run, which needs the head to start, too.

        Raises:
            EngineError: as `Engine.start`.
        """

    def unread(self, entries: Sequence[TensorEntry]) -> frozenset[str]:
        """Return the names of those of these tensors on whose values no rank of this node depends.

        Only names that are certain, because its ranks loaded exactly these tensors before; may be empty.
        """

    async def open_slot(
        self,
        slot: str,
        entries: Sequence[TensorEntry],
        *,
        on_disk: bool = False,
        unread: Collection[str] = (),
    ) -> Sink:
        """Give memory under the id of the head's sink; see `Engine.open_slot`.

        `unread`: names that `unread` returned; the sink has no buffers for them, and a rank that still reads one
        must fail.
        """

    def alive(self) -> str | None:
        """Return None while all ranks of this node run, else what is wrong; answers from memory."""

    async def stop(self) -> None:
        """Free everything, leave no process; also works on ranks that are dead or half started."""


class Engine(Protocol):
    """One inference engine inside one worker."""

    capabilities: Capabilities
    """What it can do, final from `start` on. Requests for what it lacks never reach `validate`
    or `generate` (`requests/capability_checks.py`): sampling fields, kinds of logprobs, seeds, stop strings,
    priorities, salts, pictures. One exception: where both kinds of logprobs are the same numbers (T = 1 or
    0, untruncated, unpenalised) either may be requested, whichever is declared."""

    on_end: Callable[[str], None]
    """Set by the worker before `start`; the adapter calls it in the loop with the reason once the engine has ended by
    itself. An adapter that learns it only by `alive` never calls it."""

    async def start(self, report: Callable[[Progress], None]) -> EngineInfo:
        """Load the model and begin stepping; once. Tokens are stamped (0, 0) until a commit.

        `report` may be called from any thread. If it takes too long it is cancelled; `stop` is called then,
        as after any error.

        Raises:
            EngineError: the model can't be served; the text says why and what to change.
        """

    async def stop(self) -> None:
        """Abort what runs (reason `engine`), free everything, leave no process.

        Also works on an engine that is dead, hung or half started.

        Raises:
            EngineError: it may still hold memory of a device in this process.
        """

    def validate(self, request: EngineRequest) -> None:
        """Refuse what its model can't do (ids, lengths) before anything is queued; fast.

        Raises:
            InvalidRequest: names the field and the fix.
        """

    async def prepare_pictures(self, pictures: Sequence[Picture]) -> None:
        """Compute in a thread what requests with these pictures will need, so that none of it delays others later.

        Called before such a request is validated; an engine may drop what it computed at any time. Only an engine
        that declares `multimodal` is asked.

        Raises:
            InvalidRequest: the model can't take one of them.
        """

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineDelta]:
        """Queue one output of a validated request and yield its deltas; ends after the delta with a `stop_reason`.

        Queued once the first delta is asked for, so it may be an asynchronous generator.
        Closing the iterator early aborts the request. A request keeps its place in the queue
        through pauses and commits.

        Raises:
            EngineCrashed: the engine died; what was yielded before stands.
        """

    async def abort(self, request_ids: Collection[str] | None, reason: AbortReason) -> set[str]:
        """End these requests (None: all, queued ones too) with their partial output.

        Returns the ids that were known; those of ended requests are not. Their iterators end with
        `aborted` and `reason`, also while the engine is paused.
        """

    async def hold_admission(self) -> None:
        """Start no more queued requests; running ones go on. `resume` undoes it."""

    async def pause(self) -> None:
        """Return once no step runs and none will begin; keeps KV and queue."""

    async def resume(self) -> None:
        """Undo `pause` and `hold_admission`; an engine that can't, after a commit, is replaced."""

    async def open_slot(
        self,
        entries: Sequence[TensorEntry],
        *,
        on_disk: bool = False,
        given: GivenWeights | None = None,
    ) -> Sink:
        """Give memory for one more version next to the serving one; nothing else changes.

        `entries` fit `EngineInfo.layout`, or are those of LoRA adapters (`lora/`): then the sink is a `LoraSink`, whose
        commit leaves the model's weights as they are. The worker fills one slot at a time, and closes or
        commits it before it asks for the next; a refill may be open in addition. `on_disk`: in a file
        without a name in `spill_dir`; only the engine itself asks for it, through `WeightsRefill`.
        `given`: memory that has, or will have by `seal`, the bytes of `entries`. An engine that can
        serve from it, or copy from it at the commit, takes none of its own: its sink has `took`
        and no buffers. Any other engine does not touch it, and the worker copies.

        Raises:
            WeightsRejected: this model's weights can't be updated.
            EngineError: there is not enough memory; the text says what to change.
        """

    async def commit(self, identity: WeightsId, sink: Sink, kv: KvPolicy) -> None:
        """Make the sealed `sink` the active weights; label and weights change together.

        The sink is one of this engine's; the engine owns it from now on and frees it, even if it fails.
        Called while paused, also to seed a new engine. `keep`: running requests go on with their KV,
        and their later tokens are `stale_kv`. `recompute`: their prefix is prefilled again with the new
        weights. `pin`: they go on with the former weights, which stay in memory until the last of
        them has ended, while later requests use the new ones. Outputs that were pinned before move
        to the new weights at any commit, as under `keep`: there are never more than two sets.
        Only an engine that declares `Pin` in `capabilities.in_flight` is asked to `pin`, and `Keep`
        to `keep`. The policies `Drain` and `Abort` come as `recompute` and leave nothing running; a `Drain` that
        may keep what still runs at its deadline comes as `keep`, and needs `Keep` declared.

        Raises:
            WeightsRejected: the weights can't be used after all; the old ones serve.
            EngineError: the weights are asleep; nothing changed.
        """

    async def sleep(
        self, level: Literal[1, 2], tags: Collection[MemoryTag], refill: WeightsRefill
    ) -> None:
        """Give memory back to the system; called while paused, perhaps with frozen requests.

        Level 1 keeps the weights' values elsewhere (`refill` reads them if the engine can't read
        its own memory), level 2 drops them, and what an earlier level 1 kept. Frozen requests
        whose KV is lost are prefilled again after waking, pinned ones with the active weights:
        pinned weights are given back, too, and requests that may not use others have been aborted. No
        slot is open while the weights go. Giving back memory that is given back already changes
        nothing else.
        """

    async def wake(self, tags: Collection[MemoryTag], refill: WeightsRefill | None) -> None:
        """Take memory back; `refill` reads the values of weights that were dropped.

        None: the values are not needed, nor those that level 1 kept. The weights count as resident, a slot
        can be opened, and before `resume` either a `commit` gives them values, or `sleep` takes
        their memory at level 2. An engine that serves from the next slot takes no memory until then.

        Does not resume. Raises what `refill` raises; everything stays asleep then.
        """

    async def reset_cache(self) -> None:
        """Forget reusable prefixes; running requests are unaffected."""

    def stats(self) -> EngineStats:
        """Return a snapshot; cheap."""

    def alive(self) -> str | None:
        """Return None while the engine makes progress or idles, else what is wrong.

        Called twice a second: answers from memory. A dead process is wrong, and a step that runs
        longer than the engine's step deadline; a request that waits long is not.

        Raises:
            ProcessSpent: a new engine would not work in this process either.
        """

    def metrics(self) -> str:
        """Return the engine's own metrics in the Prometheus text format, under its own names."""


def can_wake_empty(engine: Engine) -> bool:
    """Whether its weights may wake without values: it can take others in their place."""
    return 2 in engine.capabilities.sleep_levels
