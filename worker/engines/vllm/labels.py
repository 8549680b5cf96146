"""Which weights made which token.

vLLM stamps the outputs of every step with a label that we set at a commit, while nothing steps,
and keeps for each request where in its output each label began. So spans are exact, however many
steps' outputs arrive together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_worker.schemas import CHECKPOINT, WeightsId, WeightsSpan


@dataclass(frozen=True, slots=True)
class _Meaning:
    """A commit: its place in the order, its weights, whether running requests kept their KV."""

    number: int
    identity: WeightsId
    kept: bool


class Labels:
    """The labels given so far, one a commit."""

    def __init__(self) -> None:
        self._meanings = {"0": _Meaning(0, CHECKPOINT, kept=False)}
        self.current = "0"

    @property
    def identity(self) -> WeightsId:
        """The weights that the current label stands for."""
        return self._meanings[self.current].identity

    def next(self, identity: WeightsId, *, kept: bool) -> str:
        """Make the label of a new commit; it becomes current with `adopt`."""
        number = int(self.current) + 1
        self._meanings[str(number)] = _Meaning(number, identity, kept)
        return str(number)

    def adopt(self, label: str) -> None:
        """Make a label the current one: vLLM stamps it from now on."""
        self.current = label

    def spans(
        self, starts: Sequence[tuple[str, int]], begin: int, end: int
    ) -> tuple[WeightsSpan, ...]:
        """Return the spans of the tokens [begin, end) of an output.

        `starts`: (label, index of its first token) in order. KV is stale in tokens of a later
        label than the output's first one, unless the commit had it made anew.
        """
        found: list[WeightsSpan] = []
        for index, (label, start) in enumerate(starts):
            stop = starts[index + 1][1] if index + 1 < len(starts) else end
            first, last = max(start, begin), min(stop, end)
            if first >= last:
                continue
            meaning = self._meanings[label]
            found.append(
                WeightsSpan(
                    epoch=meaning.identity.epoch,
                    version=meaning.identity.version,
                    start=first,
                    end=last,
                    stale_kv=meaning.kept and index > 0,
                )
            )
        return tuple(found)
