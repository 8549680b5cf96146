"""Why writes of a pool are not done, and when each of them is tried again.

Each write has a label and a back-off of its own, so what the API server refuses delays nothing else.
A refused creation holds the others of its kind back for some seconds: an exhausted quota refuses all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from rollout_common.kube.errors import Conflict, KubeError, NotFound, Unauthorized, Unavailable
from rollout_operator.core.observed_pool import RECALLED_KEY

from .settings import (
    BUSY_RETRY_SECONDS,
    MAX_BUSY_RETRY_SECONDS,
    MAX_RETRY_SECONDS,
    MIN_RETRY_SECONDS,
    REFUSED_RETRY_SECONDS,
)

CONFLICT, REJECTED, API_ERROR = "NameConflict", "Rejected", "ApiError"

QUIET_TRIES = 4
"""So many times in a row 404 and 409 are routine: the object is gone or another one, which the watch will
show, or another client wrote it, or the quota, in between. An admission webhook answers so for longer."""

STATUS_LABEL: Final = "status write"
_DELETE_LABEL_PREFIX: Final = "delete "
_ACCOUNT_HINT = (
    "; add the namespace to the chart's workers.namespaces, or set spec.serviceAccountName"
)
_REFUSAL_PREFIX = re.compile(r'^[\w./]+ "[^"]*" is (?:forbidden|invalid): ')


@dataclass(frozen=True, slots=True)
class WriteObstacle:
    """Why a write was not done; `reason` empty: there is nothing to report, or not yet."""

    reason: str
    text: str
    tries: int
    due: float
    """When it is tried again, monotonic."""


class WriteObstacles:
    """The obstacles of one pool, by the label of the write."""

    def __init__(self) -> None:
        self._met: dict[str, WriteObstacle] = {}
        self._wanted: set[str] = set()

    @property
    def conflicts(self) -> dict[str, str]:
        """Objects of others that have names which we need: `kind/name` → sentence."""
        return self._texts_by_label(CONFLICT)

    @property
    def rejections(self) -> dict[str, str]:
        """Writes that the API server refused → sentence; creations by `kind/name`."""
        return self._texts_by_label(REJECTED)

    @property
    def api_errors(self) -> dict[str, str]:
        """Writes that the API server could not do → sentence; creations by `kind/name`."""
        return self._texts_by_label(API_ERROR)

    @property
    def awaited(self) -> frozenset[str]:
        """Writes that wait for something not worth a report: a name to get free, their turn."""
        return frozenset(label for label, met in self._met.items() if not met.reason)

    @property
    def undeleted(self) -> frozenset[str]:
        """Uids of pods whose deletion was refused."""
        found = (label for label in self._met if label.startswith(_DELETE_LABEL_PREFIX))
        return frozenset(label.removeprefix(_DELETE_LABEL_PREFIX) for label in found)

    @property
    def reported_labels(self) -> frozenset[str]:
        """Writes whose obstacles are reported; the sentences may differ at each try."""
        return frozenset({*self.conflicts, *self.rejections, *self.api_errors})

    def _texts_by_label(self, reason: str) -> dict[str, str]:
        return {
            label: met.text
            for label, met in self._met.items()
            if met.reason == reason and label != STATUS_LABEL
        }

    def begin_pass(self) -> None:
        """Begin to note which writes the pool still wants."""
        self._wanted = {STATUS_LABEL}

    def end_pass(self) -> None:
        """Drop the obstacles of writes that the pool does not want any more."""
        self._met = {label: met for label, met in self._met.items() if label in self._wanted}

    def retry_now(self) -> None:
        """Let every write be tried at once; its obstacle is reported until then."""
        self._met = {x: replace(m, due=0.0, tries=min(m.tries, 1)) for x, m in self._met.items()}

    def is_waiting(self, label: str, now: float) -> bool:
        """Whether this write, which is wanted, was refused a short while ago."""
        self._wanted.add(label)
        met = self._met.get(label)
        return met is not None and now < met.due

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the first of the writes may be tried again; None: none waits."""
        waiting = self._wanted & self._met.keys() - {STATUS_LABEL}
        left = min((self._met[label].due - now for label in waiting), default=math.inf)
        return None if left == math.inf else max(MIN_RETRY_SECONDS, left)

    def retry_in(self, label: str, now: float) -> float:
        """Seconds until this write, which was refused, may be tried again."""
        return max(MIN_RETRY_SECONDS, self._met[label].due - now)

    def is_refused(self, label: str) -> bool:
        """Whether the API server did not do this write, for another reason than a taken name."""
        met = self._met.get(label)
        return met is not None and met.tries > 0 and met.reason != CONFLICT

    def retry_order(self, label: str) -> int:
        """Sorts writes of a kind: those about to be reported, those never tried, those refused most."""
        met = self._met.get(label)
        return -1 if met is not None and met.tries and not met.reason else self.count_tries(label)

    def count_tries(self, label: str) -> int:
        """How often in a row this write was refused."""
        return self._met[label].tries if label in self._met else 0

    def get(self, label: str) -> WriteObstacle | None:
        """The obstacle of this write."""
        return self._met.get(label)

    def note_obstacle(
        self, label: str, reason: str, text: str, due: float, tries: int = 1
    ) -> WriteObstacle:
        """Note why a write is not done; its label is wanted."""
        self._wanted.add(label)
        self._met[label] = met = WriteObstacle(reason, text, tries, due)
        return met

    def note_failed_write(
        self, label: str, what: str, error: KubeError, now: float
    ) -> WriteObstacle:
        """Note that the API server did not do a write; `what` names the object and the change."""
        tries = self.count_tries(label) + 1
        routine = isinstance(error, Conflict | NotFound)
        if routine and tries <= QUIET_TRIES:
            return self.note_obstacle(
                label, "", "", now + MIN_RETRY_SECONDS * 2.0 ** (tries - 1), tries
            )
        busy = isinstance(error, Unavailable | Unauthorized) or error.status in (0, 200)
        doublings = min(tries - 1 - (QUIET_TRIES if routine else 0), 20)
        wait = (BUSY_RETRY_SECONDS if busy else REFUSED_RETRY_SECONDS) * 2.0**doublings
        # After an outage of any length all goes on soon; a refusal needs a person to act.
        wait = min(MAX_BUSY_RETRY_SECONDS if busy else MAX_RETRY_SECONDS, wait)
        wait = max(wait, min(MAX_RETRY_SECONDS, error.retry_after or 0.0))
        text = _REFUSAL_PREFIX.sub("", error.said)
        if busy:
            code = f"{error.status} {error.reason}" if error.status else "no answer"
            text = f"the API server could not take {what} ({code}): {text}"
        else:
            hint = _ACCOUNT_HINT if "service account" in text else ""
            text = f"the API server rejected {what}: {text}{hint}"
        reason = API_ERROR if busy else REJECTED
        return self.note_obstacle(label, reason, text, now + wait, tries)

    def hold_kind(self, kind: str, refused: str, rest: Iterable[str], now: float) -> None:
        """Hold the rest of a kind back after the refusal of one: for longer each time, up to 10 s."""
        tries = self.count_tries(kind) + 1
        wait = max(self._met[refused].due - now, MIN_RETRY_SECONDS * 2.0 ** min(tries, 20))
        due = now + min(REFUSED_RETRY_SECONDS, wait)
        self.note_obstacle(kind, "", "", due, tries)
        self.hold_back(rest, due)

    def hold_back(self, labels: Iterable[str], due: float) -> None:
        """Hold these writes back until `due`, whatever else is known of them."""
        for label in labels:
            self._wanted.add(label)
            met = self._met.get(label)
            if met is None or not met.tries:
                self.note_obstacle(label, "", "", due, 0)
            else:
                self._met[label] = replace(met, due=max(met.due, due))

    def clear_obstacle(self, label: str) -> None:
        """Note that a write was done."""
        self._met.pop(label, None)

    def recall_obstacle(self, reason: str, text: str) -> None:
        """Believe in what the last process met until the write is tried."""
        if reason in (CONFLICT, REJECTED, API_ERROR):
            self.note_obstacle(RECALLED_KEY, reason, text, 0.0, 0)
