"""A worker as `plan_pass` sees it: what it would answer, and what it makes of the calls that it gets."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout_worker.schemas import (
    ActiveWeights,
    CommitRequest,
    DiscardRequest,
    Hold,
    KeptWeights,
    Lifecycle,
    Progress,
    Pushed,
    RequireRequest,
    Resident,
    StagedWeights,
    StageRequest,
    TurnState,
    WakeRequest,
    WeightsId,
    WeightsSource,
    WeightsState,
    WorkerState,
)

ME = "operator"
STAGE_ERROR = "tensor 'lm_head.weight' has shape [3]"


def root_hash(identity: WeightsId, source: WeightsSource | None = None) -> str:
    """Hash of the bytes that lie at a source; the usual path of an identity has the usual bytes."""
    path = source.path if source else None
    usual = path in (None, f"/rollout/weights/{identity.epoch}-{identity.version}")
    return f"hash{identity}" if usual else f"hash{identity} at {path}"


@dataclass
class SimWorker:
    """What a real worker would answer."""

    boot: str
    active: WeightsId = field(default_factory=lambda: WeightsId(epoch=0, version=0))
    active_hash: str = "hash(0, 0)"
    staged: StagedWeights | None = None
    required: WeightsId | None = None
    fence_epoch: int = 0
    hold: str | None = None
    foreign_hold: str | None = None
    loading: bool = True
    silent: bool = False
    """It answers no poll."""
    silent_since: float | None = None
    """When the polls noticed."""
    unasked: bool = False
    """No poll of it has ended yet."""
    broken_stage: bool = False
    broken_commit: bool = False
    policies: tuple[str, ...] = ("Drain", "Abort", "Keep", "Recompute")
    """What its engine can do with requests in flight."""
    other_bytes: str = ""
    """What its node shows at a source that others read differently."""
    failed: bool = False
    """Its engine is dead, and it says why in `last_error`."""
    last_error: str | None = None
    progress: Progress | None = None
    turn: TurnState | None = None
    commits: list[WeightsId] = field(default_factory=list)
    wakes_empty: bool = True
    """Whether its weights may wake without values, which not every worker knows."""
    woken: bool = False
    """It sleeps, but the memory of its weights is back."""
    empty: bool = False
    """And they have no values."""
    reads: list[WeightsId] = field(default_factory=list)
    """Weights that it has read to wake."""
    in_flight: int = 0
    """Outputs that it works on."""
    drain: float | None = None
    """What running requests get at its end."""
    kept: KeptWeights | None = None
    """The pushed version that it serves, as long as it has room for a copy."""
    generation: int | None = None
    """The newest one that it was called with."""
    slot_seen: object = None
    slot_since: float = 0.0
    """When its slot came to hold what the last poll saw in it."""

    @property
    def lifecycle(self) -> Lifecycle:
        if self.failed or self.loading:
            return Lifecycle.FAILED if self.failed else Lifecycle.LOADING
        holds = {self.hold, self.foreign_hold}
        if "Asleep" in holds:
            return Lifecycle.ASLEEP
        return Lifecycle.PAUSED if "Paused" in holds else Lifecycle.ACTIVE

    @property
    def resident(self) -> Resident:
        asleep = self.lifecycle is Lifecycle.ASLEEP
        return Resident(weights=not asleep or self.woken, kv_cache=not asleep)

    @property
    def serving(self) -> bool:
        return (
            self.lifecycle is Lifecycle.ACTIVE
            and self.required is not None
            and self.active >= self.required
        )

    def state(self) -> WorkerState:
        holds = []
        if self.hold:
            holds.append(Hold(holder=ME, state=self.hold))
        if self.foreign_hold:
            holds.append(Hold(holder="trainer", state=self.foreign_hold))
        active = ActiveWeights(
            epoch=self.active.epoch, version=self.active.version, root_hash=self.active_hash
        )
        return WorkerState(
            boot_id=self.boot,
            engine="hf",
            lifecycle=self.lifecycle,
            serving=self.serving,
            weights=WeightsState(
                active=None if self.empty else active,
                staged=self.staged,
                required=self.required,
                fence_epoch=self.fence_epoch,
                kept=self.kept,
            ),
            resident=self.resident,
            wakes_empty=self.wakes_empty,
            holds=tuple(holds),
            caller=ME,
            generation=self.generation,
            progress=self.progress,
            turn=self.turn,
            last_error=self.last_error,
            drain_seconds=self.drain,
            in_flight=self.in_flight,
            in_flight_policies=self.policies,
        )

    def begin_stage(self, body: StageRequest) -> str | None:
        """Take the request; the bytes come with `end_stage`."""
        if not self.resident.weights and body.source.pushed is None:
            return "asleep"
        if body.epoch < self.fence_epoch:
            return "stale-epoch"
        if self.staged is not None and (self.staged.epoch, self.staged.version) > body_id(body):
            return "superseded"
        slot = self.staged
        if slot and (slot.epoch, slot.version) == body_id(body) and slot.phase != "Failed":
            return _other(body, slot.root_hash)  # it is there already, or on its way
        self.staged = StagedWeights(
            epoch=body.epoch,
            version=body.version,
            source=body.source.without_bytes,
            phase="Staging",
        )
        return None

    def end_stage(self, body: StageRequest) -> str | None:
        """The bytes are there; discarded meanwhile counts as an end, too."""
        slot = self.staged
        if slot is None or slot.phase != "Staging" or slot.source != body.source.without_bytes:
            return None
        if (slot.epoch, slot.version) != body_id(body):
            return None
        found = root_hash(WeightsId(epoch=body.epoch, version=body.version), slot.source)
        found += self.other_bytes
        odd = None if self.broken_stage else _other(body, found)
        error = STAGE_ERROR if self.broken_stage else odd
        slug = "content-mismatch" if odd else None
        failed = {"phase": "Failed", "error": error, "slug": slug}
        change = failed if error else {"phase": "Staged"}
        self.staged = slot.model_copy(update={**change, "root_hash": None if error else found})
        return error

    def stage(self, body: StageRequest) -> str | None:
        """Both at once."""
        return self.begin_stage(body) or self.end_stage(body)

    def lend(self, identity: WeightsId) -> bool:
        """A trainer's tensors are read into its weights, which are in memory while it sleeps."""
        assert self.lifecycle is Lifecycle.ASLEEP
        if not self.push(identity):
            return False
        self.woken = self.empty = True
        self.turn = TurnState(state="Held", devices=("gpu-0",), lent=True)
        return True

    def push(self, identity: WeightsId) -> bool:
        """A trainer's bytes come, whole, into the slot, also asleep; whether it took them."""
        if self.silent or self.loading or self.failed or identity < self.active:
            return False
        slot = self.staged
        later = slot is not None and (slot.epoch, slot.version) > identity.as_tuple()
        if self.broken_stage or later or identity.epoch < self.fence_epoch:
            return False
        self.staged = StagedWeights(
            epoch=identity.epoch,
            version=identity.version,
            source=WeightsSource(pushed=Pushed()),
            phase="Staged",
            root_hash=root_hash(identity) + self.other_bytes,
        )
        return True

    def commit(self, body: CommitRequest) -> str | None:
        """Flip, or say why not."""
        if self.broken_commit:
            return "commit broke"
        if not self.resident.weights:
            return "asleep"
        if body.in_flight not in self.policies:
            return f"the engine can't {body.in_flight}"
        staged = self.staged
        if staged is None or (staged.epoch, staged.version) != body_id(body):
            return "not-staged"
        identity = WeightsId(epoch=body.epoch, version=body.version)
        if identity < self.active:
            return "version-regressed"  # it has come by later ones meanwhile
        assert staged.phase == "Staged", "only whole weights are committed"
        assert body.root_hash == staged.root_hash is not None, "only the staged bytes are committed"
        self.active, self.active_hash, self.staged = identity, staged.root_hash, None
        self.kept = None
        if staged.source.pushed is not None:
            self.kept = KeptWeights(**identity.model_dump(), root_hash=staged.root_hash, bytes=1)
        self.empty = False
        self.commits.append(identity)
        return None

    def sleep(self) -> None:
        """Give all memory back, and what is staged with it; what came while it slept stays."""
        if self.resident.weights:
            self.staged = None
        self.hold, self.woken, self.empty = "Asleep", False, False

    def pause(self) -> None:
        self.hold_with("Paused")

    def resume(self) -> None:
        """Drop the hold of a pause."""
        self.hold = None

    def wake(self, body: WakeRequest) -> str | None:
        """Take memory back, that of weights alone and without values if so asked."""
        if body.load is False:
            assert self.wakes_empty, "a worker that doesn't know the field refuses it"
            assert body.tags == ("weights",), "the KV cache comes last"
            if not self.resident.weights:
                self.empty = self.woken = True
            return "held" if self.foreign_hold else None
        self.hold_with(None)
        return None

    def hold_with(self, hold: str | None) -> None:
        """Change the hold of ours; who is to have weights then reads those that it had."""
        if self.hold == "Asleep" and (self.empty or not self.woken):
            self.reads.append(self.active)
        self.hold, self.woken, self.empty = hold, False, False

    def jump(self, identity: WeightsId) -> None:
        """It has these weights, however it came by them."""
        self.active, self.active_hash, self.kept = identity, root_hash(identity), None

    def discard(self, body: DiscardRequest) -> None:
        """Empty the slot, if it holds this."""
        if self.staged is not None and (self.staged.epoch, self.staged.version) == body_id(body):
            self.staged = None

    def require(self, body: RequireRequest) -> None:
        """Raise the floor or fence an epoch."""
        self.fence_epoch = max(self.fence_epoch, body.epoch)
        self.drain = body.drain_seconds or self.drain
        if body.min_version is not None:
            floor = WeightsId(epoch=body.epoch, version=body.min_version)
            self.required = floor if self.required is None else max(self.required, floor)


def _other(body: StageRequest, found: str | None) -> str | None:
    """The worker's refusal of bytes that are not those it was told of."""
    if None in (body.root_hash, found) or body.root_hash == found:
        return None
    return f"content-mismatch: it should have root_hash {body.root_hash}, not {found}"


def body_id(body: StageRequest | CommitRequest | DiscardRequest) -> tuple[int, int]:
    """The identity that a request speaks of."""
    return body.epoch, body.version
