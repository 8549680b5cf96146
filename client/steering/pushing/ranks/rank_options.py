"""What every rank of a trainer knows of a publish."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Options of one publish.

    Attributes:
        seconds: How long the publish may take.
        delta: Whether the bytes are kept, so that deltas to the next version may be sent.
    """

    seconds: float
    delta: bool = False
