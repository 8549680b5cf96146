"""What the balancer knows of one member, and which weights a request takes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_client.discovery.pool_members import Member
from rollout_common.wire import WeightsId, WorkerInfo


@dataclass(frozen=True, slots=True)
class WeightsBounds:
    """Limits on the weights that serve a request, read as a worker's admission reads these fields."""

    epoch: int | None = None
    min_version: int | None = None
    exact_version: int | None = None

    @classmethod
    def at_least(cls, weights: WeightsId | None) -> WeightsBounds:
        """Return the bounds of requests that take these weights and newer ones; None: any."""
        return cls() if weights is None else cls(weights.epoch, weights.version)

    def admits(self, active: WeightsId | None) -> bool:
        """Whether these weights may serve the request; unknown ones (None) may."""
        if active is None:
            return True
        epoch = active.epoch if self.epoch is None else self.epoch
        if self.exact_version is not None and active.as_tuple() != (epoch, self.exact_version):
            return False
        return active.as_tuple() >= (epoch, self.min_version or 0)

    def is_passed_by(self, active: WeightsId | None) -> bool:
        """Whether these weights are newer than the exact version, so that waiting does not help."""
        if active is None or self.exact_version is None:
            return False
        epoch = active.epoch if self.epoch is None else self.epoch
        return active.as_tuple() > (epoch, self.exact_version)


ANY_WEIGHTS = WeightsBounds()


@dataclass(slots=True, eq=False)
class MemberRecord:
    """A member, what runs on it, and what its answers said."""

    member: Member
    in_flight: int = 0
    present: bool = True
    """False: discovery no longer has it; the record stays while requests run on it."""
    excluded: str = ""
    """Why it gets no requests; empty: it gets some."""
    excluded_until: float | None = None
    """When it gets requests again without a probe; None: only after one."""
    failures: int = 0
    """How often it failed since it last answered that it serves."""
    active: WeightsId | None = None
    """Weights that it serves; None: not known."""
    passed_over: bool = False
    """A request went elsewhere because of them since it was last asked."""
    pace: float | None = None
    """Seconds per sampled token, smoothed; None: not measured lately."""
    paced_at: float = 0.0
    slowness: float = 1.0
    """Its pace divided by the median one; 1 if it is near that."""
    chosen: int = 0
    """The balancer's turn in which it was chosen last."""
    probe_at: float = 0.0
    """When it may be probed again."""
    info: WorkerInfo | None = None
    """How it describes itself; None: not asked yet."""
    info_at: float = 0.0
    """When it may be asked for `info`."""

    def exclude_until(self, why: str, probe_at: float, until: float | None = None) -> None:
        """Give it no requests until then, or (None) until a probe says that it serves."""
        self.failures += 1
        self.excluded, self.excluded_until, self.probe_at = why, until, probe_at
        if until is None:
            # The process that comes back may be another one, with another model.
            self.info, self.info_at = None, probe_at

    def admit_again(self) -> None:
        """Give it requests again: it has answered that it serves."""
        self.excluded, self.excluded_until, self.failures = "", None, 0

    @property
    def weighted_load(self) -> float:
        """Requests in flight times how slow it is."""
        return self.in_flight * self.slowness

    def exclusion_reason(self, now: float) -> str:
        """Why it is excluded now; empty if it is not."""
        over = self.excluded_until is not None and now >= self.excluded_until
        return "" if over else self.excluded

    def is_usable(self, now: float) -> bool:
        """Whether it may get requests."""
        return self.present and self.member.ready and not self.exclusion_reason(now)

    def unusable_reason(self, now: float, bounds: WeightsBounds = ANY_WEIGHTS) -> str:
        """Why it gets no request with these bounds now; empty if it gets some."""
        if not self.present:
            return "gone"
        if not self.member.ready:
            return "not ready"
        if not self.is_usable(now):
            return self.excluded
        return "" if bounds.admits(self.active) else f"has weights {self.active}"
