"""Answers of the data port, as tests of a whole pool collect them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Identity = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the data port."""

    status: int
    body: dict[str, Any]
    ended: float

    @property
    def identities(self) -> list[Identity]:
        """Identities of the first output, in order."""
        return [(s["epoch"], s["version"]) for s in self.body["outputs"][0]["weights"]]


@dataclass(slots=True)
class Traffic:
    """Short requests without a pause, while the block runs."""

    replies: list[Reply] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def served(self) -> list[Identity]:
        """Identities in the order of their first answer."""
        ok = sorted((r for r in self.replies if r.status == 200), key=lambda r: r.ended)
        return list(dict.fromkeys(identity for r in ok for identity in r.identities))

    @property
    def refused(self) -> list[Reply]:
        """Answers other than 200."""
        return [r for r in self.replies if r.status != 200]
