"""How a pool without an operator is steered."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollout_common.wire import (
    CommitRequest,
    InFlightPolicy,
    OnDeadline,
    SleepRequest,
    WeightsId,
)

from .control_ports import Token


@dataclass(frozen=True, slots=True)
class DirectOptions:
    """How a pool without an operator is steered.

    Attributes:
        token: Bearer token of the control ports, or a function that returns it.
        control_ca: File with the certificates that the control ports' own are checked against, where
            their URLs are https; default: the public ones.
        in_flight: What a commit does to running requests.
        drain_seconds: How long running requests may go on before a commit, a sleep or a pause.
        on_deadline: What happens to those that still run then.
        sleep_level: 1 keeps a copy of the weights, 2 drops them.
    """

    token: Token = None
    control_ca: str | Path | None = None
    in_flight: InFlightPolicy = "Drain"
    drain_seconds: float = 30.0
    on_deadline: OnDeadline = "Abort"
    sleep_level: int = 1

    def __post_init__(self) -> None:
        # Once weights are staged it is too late to find out that no worker accepts these.
        self.commit_request(WeightsId(epoch=0, version=0))
        self.sleep_request()

    def commit_request(
        self, identity: WeightsId, seconds: float | None = None, root_hash: str | None = None
    ) -> CommitRequest:
        """Return the order to flip to staged weights of this content, drained in at most so many seconds."""
        drain = self.drain_seconds if seconds is None else min(self.drain_seconds, seconds)
        return CommitRequest(
            epoch=identity.epoch,
            version=identity.version,
            root_hash=root_hash,
            in_flight=self.in_flight,
            deadline_seconds=drain,
            on_deadline=self.on_deadline,
        )

    def sleep_request(self) -> SleepRequest:
        """Return the order to fall asleep."""
        return SleepRequest.model_validate(
            {"level": self.sleep_level, "deadline_seconds": self.drain_seconds}
        )
