"""Ways to choose a worker for a turn of a conversation: round robin, least in flight, sticky."""

from __future__ import annotations

from itertools import count
from typing import Protocol

from typing_extensions import override


class Policy(Protocol):
    """Chooses workers by URL."""

    continues: bool
    """Whether a turn that broke off keeps the tokens it had."""

    def choose(self, key: str, now: float) -> str:
        """Return the URL for a turn of the conversation `key`."""

    def ended(self, url: str, now: float, pace: float | None = None) -> None:
        """Note that a turn ended there, at this pace in seconds per token."""

    def died(self, url: str, now: float) -> None:
        """Note that this worker no longer answers."""


class RoundRobin(Policy):
    """One after the other."""

    continues = False

    def __init__(self, urls: list[str]) -> None:
        self.urls = list(urls)
        self._turn = count()

    @override
    def choose(self, key: str, now: float) -> str:
        return self.urls[next(self._turn) % len(self.urls)]

    @override
    def ended(self, url: str, now: float, pace: float | None = None) -> None:
        pass

    @override
    def died(self, url: str, now: float) -> None:
        self.urls.remove(url)


class LeastInFlight(RoundRobin):
    """The one with the fewest turns in flight; the first of equals."""

    def __init__(self, urls: list[str]) -> None:
        super().__init__(urls)
        self.load = dict.fromkeys(urls, 0)

    @override
    def choose(self, key: str, now: float) -> str:
        url = min(self.urls, key=self.load.__getitem__)
        self.load[url] += 1
        return url

    @override
    def ended(self, url: str, now: float, pace: float | None = None) -> None:
        self.load[url] = max(0, self.load[url] - 1)


class Sticky(LeastInFlight):
    """verl's: a conversation stays where it began, however busy that worker is."""

    def __init__(self, urls: list[str]) -> None:
        super().__init__(urls)
        self._home: dict[str, str] = {}

    @override
    def choose(self, key: str, now: float) -> str:
        home = self._home.get(key)
        if home in self.urls and home is not None:
            self.load[home] += 1
            return home
        self._home[key] = super().choose(key, now)
        return self._home[key]


OTHERS: dict[str, type[RoundRobin]] = {
    "round robin": RoundRobin,
    "sticky forever (verl)": Sticky,
    "least in flight": LeastInFlight,
}
"""Those that the client's balancer is compared with."""
