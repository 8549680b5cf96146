"""Media tensors, turn by turn: appended without copying, concatenated when a batch needs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from .messages import Media
from .opaque import Opaque


class MediaTurn(BaseModel):
    """Media of the tokens `[start, end)`: tensors by name, and how many items of each key."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    start: int
    end: int
    inputs: Opaque
    counts: dict[str, int]


def joined(turns: list[MediaTurn]) -> dict[str, Any]:
    """Return the tensors of all turns, concatenated on their first axis."""
    found: dict[str, list[Any]] = {}
    for turn in turns:
        for key, value in turn.inputs.items():
            found.setdefault(key, []).append(value)
    return {key: _concatenated(values) for key, values in found.items()}


def _concatenated(values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if type(values[0]).__module__.partition(".")[0] == "numpy":
        import numpy as np

        return np.concatenate(values)
    import torch

    return torch.cat(values)


@dataclass(slots=True)
class Kept:
    """What a cut leaves: media turns, items, and where the conversation really ends."""

    turns: list[MediaTurn]
    data: Media
    length: int = field(default=0)


def kept(turns: list[MediaTurn], data: Mapping[str, list[Any]], length: int) -> Kept:
    """Return the media of the first tokens: a turn with media is kept whole or cut whole."""
    result = Kept(list(turns), {key: list(items) for key, items in data.items()}, length)
    while result.turns and result.turns[-1].end > result.length:
        turn = result.turns.pop()
        result.length = min(result.length, turn.start)
        for key, count in turn.counts.items():
            if count:
                del result.data[key][-count:]
    return result
