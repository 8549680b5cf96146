"""What takes time to make of a request, and so is made before it is admitted in one step."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_worker.engine import Grammar
from rollout_worker.pictures.picture import Picture


@dataclass(frozen=True, slots=True)
class PreparedParts:
    """The checked grammar of a request, and its decoded pictures."""

    grammar: Grammar | None = None
    pictures: tuple[Picture, ...] = ()


NO_PARTS = PreparedParts()
