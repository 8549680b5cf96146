"""Which weights a request takes, read as the worker's admission reads the same fields. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_common.wire import WeightsId


@dataclass(frozen=True, slots=True)
class WeightsBounds:
    """Limits on the weights that serve a request; None is no limit."""

    epoch: int | None = None
    min_version: int | None = None
    exact_version: int | None = None

    def admits(self, active: WeightsId | None) -> bool:
        """Whether these weights will do; unknown ones get the benefit of the doubt."""
        if active is None:
            return True
        epoch = active.epoch if self.epoch is None else self.epoch
        if self.exact_version is not None and active.as_tuple() != (epoch, self.exact_version):
            return False
        return active.as_tuple() >= (epoch, self.min_version or 0)

    def is_passed_by(self, active: WeightsId | None) -> bool:
        """Whether these weights are newer than the exact version: waiting for it is no use."""
        if active is None or self.exact_version is None:
            return False
        epoch = active.epoch if self.epoch is None else self.epoch
        return active.as_tuple() > (epoch, self.exact_version)


ANY_WEIGHTS = WeightsBounds()
