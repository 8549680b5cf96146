"""The fence: the lowest epoch that may change weights, and the floor below which no weights are served.

Both only rise. The epoch shuts out an older trainer; the floor keeps old weights from being served.
"""

from __future__ import annotations

import logging
from typing import Any

from rollout_common.wire import RequireRequest, WeightsId
from rollout_common.wire.problems import conflict_problem

logger = logging.getLogger(__name__)


class WeightsFence:
    """What `POST /v1/require` has set since this process started."""

    def __init__(self) -> None:
        self.floor: WeightsId | None = None
        self.epoch = 0

    def raise_to(self, caller: str, request: RequireRequest) -> None:
        """Raise the epoch and, with a version, the floor; a repeated call changes nothing.

        Raises:
            ProblemError: 409, one of them would go down.
        """
        if request.min_version is None:
            self.check_epoch(request.epoch)
        else:
            self._raise_floor(caller, WeightsId(epoch=request.epoch, version=request.min_version))
        if request.epoch > self.epoch:
            logger.info("epochs below %d are refused, as %r requires", request.epoch, caller)
            self.epoch = request.epoch

    def _raise_floor(self, caller: str, floor: WeightsId) -> None:
        if self.floor is not None and floor < self.floor:
            slug = "stale-epoch" if floor.epoch < self.floor.epoch else "version-regressed"
            raise conflict_problem(
                slug,
                f"the floor {self.floor} never goes down to {floor}: read the state again",
                required=self.floor.model_dump(),
            )
        if floor != self.floor:
            logger.info("weights below %s are not served, as %r requires", floor, caller)
        self.floor = floor

    def follow_commit(self, active: WeightsId) -> None:
        """Raise an existing floor to the committed weights, so that nobody has to call for it."""
        if self.floor is not None and self.floor < active:
            self.floor = active

    def check_epoch(self, epoch: int, **facts: Any) -> None:
        """Refuse a fenced epoch; `facts` go into the answer.

        Raises:
            ProblemError: 409 `stale-epoch`.
        """
        if epoch < self.epoch:
            raise conflict_problem(
                "stale-epoch",
                f"epoch {epoch} is fenced off, {self.epoch} was seen: a newer trainer owns this"
                " worker",
                fence_epoch=self.epoch,
                **facts,
            )
