"""What keeps the writes of one pool from being done, and when each of them is tried again.

Each write has a label and a back-off of its own, so what the API server refuses delays nothing else.
A refused creation holds the others of its kind back for some seconds: an exhausted quota refuses all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from rollout_operator.core.world import RECALLED
from rollout_operator.kube.errors import Conflict, KubeError, NotFound, Unauthorized, Unavailable

CONFLICT, REJECTED, API_ERROR = "NameConflict", "Rejected", "ApiError"

RETRY_SECONDS = 10.0
"""How soon a refused write is tried again, and a name that is taken; doubled after each refusal."""

BUSY_SECONDS = 1.0
"""The same, where the API server could not answer or asked to come later."""

MAX_BUSY_SECONDS = 30.0
"""Longest time until what the API server could not take is tried again."""

MAX_SECONDS = 300.0
SOON_SECONDS = 0.2
QUIET_TRIES = 4
"""So often in a row 404 and 409 are routine: the object is gone or another one, which the watch will show, or
somebody else wrote it, or the quota, in between. What answers so for longer is an admission webhook."""

STATUS: Final = "status write"
_DELETE: Final = "delete "
_ACCOUNT_HINT = (
    "; add the namespace to the chart's workers.namespaces, or set spec.serviceAccountName"
)
_PREFIX = re.compile(r'^[\w./]+ "[^"]*" is (?:forbidden|invalid): ')


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a write was not done; `reason` empty: there is nothing to tell, or not yet."""

    reason: str
    text: str
    tries: int
    due: float
    """When it is tried again, monotonic."""


class Obstacles:
    """The obstacles of one pool, by the label of the write; see the module."""

    def __init__(self) -> None:
        self._met: dict[str, Obstacle] = {}
        self._wanted: set[str] = set()

    @property
    def conflicts(self) -> dict[str, str]:
        """Objects of others that have names which we need: `kind/name` → sentence."""
        return self._told(CONFLICT)

    @property
    def rejections(self) -> dict[str, str]:
        """Writes that the API server refused → sentence; creations by `kind/name`."""
        return self._told(REJECTED)

    @property
    def api_errors(self) -> dict[str, str]:
        """Writes that the API server could not do → sentence; creations by `kind/name`."""
        return self._told(API_ERROR)

    @property
    def awaited(self) -> frozenset[str]:
        """Writes that wait for something that is not worth telling: a name to get free, their turn."""
        return frozenset(label for label, met in self._met.items() if not met.reason)

    @property
    def undeleted(self) -> frozenset[str]:
        """Uids of pods whose deletion was refused."""
        found = (label for label in self._met if label.startswith(_DELETE))
        return frozenset(label.removeprefix(_DELETE) for label in found)

    @property
    def labels(self) -> frozenset[str]:
        """What is told of; what is said may differ at each try."""
        return frozenset({*self.conflicts, *self.rejections, *self.api_errors})

    def _told(self, reason: str) -> dict[str, str]:
        return {
            label: met.text
            for label, met in self._met.items()
            if met.reason == reason and label != STATUS
        }

    def begin_pass(self) -> None:
        """Begin to note which writes are wanted still."""
        self._wanted = {STATUS}

    def end_pass(self) -> None:
        """Drop what stood in the way of writes that nobody wants any more."""
        self._met = {label: met for label, met in self._met.items() if label in self._wanted}

    def retry_now(self) -> None:
        """Let everything be tried at once; what is told stays told until then."""
        self._met = {x: replace(m, due=0.0, tries=min(m.tries, 1)) for x, m in self._met.items()}

    def waits(self, label: str, now: float) -> bool:
        """Whether this write, which is wanted, was refused a short while ago."""
        self._wanted.add(label)
        met = self._met.get(label)
        return met is not None and now < met.due

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the first of the writes may be tried again; None: none waits."""
        waiting = self._wanted & self._met.keys() - {STATUS}
        left = min((self._met[label].due - now for label in waiting), default=math.inf)
        return None if left == math.inf else max(SOON_SECONDS, left)

    def retry_in(self, label: str, now: float) -> float:
        """Seconds until this write, which was refused, may be tried again."""
        return max(SOON_SECONDS, self._met[label].due - now)

    def is_refused(self, label: str) -> bool:
        """Whether the API server did not do this write: not because its name is taken."""
        met = self._met.get(label)
        return met is not None and met.tries > 0 and met.reason != CONFLICT

    def turn(self, label: str) -> int:
        """Sorts writes of a kind: what is about to be told, what was never tried, what was refused most."""
        met = self._met.get(label)
        return -1 if met is not None and met.tries and not met.reason else self.tries(label)

    def tries(self, label: str) -> int:
        """How often in a row this write was refused."""
        return self._met[label].tries if label in self._met else 0

    def get(self, label: str) -> Obstacle | None:
        """What stands in the way of this write."""
        return self._met.get(label)

    def note(self, label: str, reason: str, text: str, due: float, tries: int = 1) -> Obstacle:
        """Note why a write is not done; its label is wanted."""
        self._wanted.add(label)
        self._met[label] = met = Obstacle(reason, text, tries, due)
        return met

    def meet(self, label: str, what: str, error: KubeError, now: float) -> Obstacle:
        """Note that the API server did not do a write; `what` names the object and the change."""
        tries = self.tries(label) + 1
        routine = isinstance(error, Conflict | NotFound)
        if routine and tries <= QUIET_TRIES:
            return self.note(label, "", "", now + SOON_SECONDS * 2.0 ** (tries - 1), tries)
        busy = isinstance(error, Unavailable | Unauthorized) or error.status in (0, 200)
        doublings = min(tries - 1 - (QUIET_TRIES if routine else 0), 20)
        wait = (BUSY_SECONDS if busy else RETRY_SECONDS) * 2.0**doublings
        # Soon after an outage all goes on, whatever it lasted; a refusal needs somebody to act.
        wait = min(MAX_BUSY_SECONDS if busy else MAX_SECONDS, wait)
        wait = max(wait, min(MAX_SECONDS, error.retry_after or 0.0))
        text = _PREFIX.sub("", error.said)
        if busy:
            code = f"{error.status} {error.reason}" if error.status else "no answer"
            text = f"the API server could not take {what} ({code}): {text}"
        else:
            hint = _ACCOUNT_HINT if "service account" in text else ""
            text = f"the API server rejected {what}: {text}{hint}"
        reason = API_ERROR if busy else REJECTED
        return self.note(label, reason, text, now + wait, tries)

    def hold_kind(self, kind: str, refused: str, rest: Iterable[str], now: float) -> None:
        """Hold the rest of a kind back after the refusal of one: for longer each time, up to 10 s."""
        tries = self.tries(kind) + 1
        wait = max(self._met[refused].due - now, SOON_SECONDS * 2.0 ** min(tries, 20))
        due = now + min(RETRY_SECONDS, wait)
        self.note(kind, "", "", due, tries)
        self.hold(rest, due)

    def hold(self, labels: Iterable[str], due: float) -> None:
        """Hold these writes back until then, whatever else is known of them."""
        for label in labels:
            self._wanted.add(label)
            met = self._met.get(label)
            if met is None or not met.tries:
                self.note(label, "", "", due, 0)
            else:
                self._met[label] = replace(met, due=max(met.due, due))

    def overcome(self, label: str) -> None:
        """Note that a write was done."""
        self._met.pop(label, None)

    def recall(self, reason: str, text: str) -> None:
        """Take for true, until it is tried, what the last process met: it has not gone since."""
        if reason in (CONFLICT, REJECTED, API_ERROR):
            self.note(RECALLED, reason, text, 0.0, 0)
