"""Members of a pool, as discovery finds them: one for each replica, its head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

DATA_PORT = 8000
CONTROL_PORT = 8001


@dataclass(frozen=True, slots=True)
class Member:
    """One replica's head.

    Attributes:
        url: Of its data port; it identifies the member.
        name: For people: the pod's name where there is one.
        control_url: Of its control port; None: not known.
        ready: Whether discovery says that it may get requests. The worker's own answers count, too.
        proven: False: nobody says that it is there, so it must answer `GET /ready` before it gets requests.
    """

    url: str
    name: str
    control_url: str | None = None
    ready: bool = True
    proven: bool = True


Publish = Callable[[Sequence[Member]], None]
"""Takes the whole set of members whenever it has changed."""


class Discovery(Protocol):
    """Finds members until it is cancelled."""

    trouble: str
    """Why it learns nothing new at the moment; empty: all is well."""

    refused: bool
    """Whether that is a refusal, which waiting does not mend."""

    async def run_discovery(self, publish: Publish) -> None:
        """Publish the set as soon as it is known, and after each change.

        A passing failure does not end it: the last set stays, and it tries again.
        """


class StaticDiscovery:
    """A fixed list of data ports."""

    trouble = ""
    refused = False

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = tuple(members)

    async def run_discovery(self, publish: Publish) -> None:
        """Publish the list and return: it never changes."""
        publish(self._members)


def static_members(
    urls: Sequence[str], control_urls: Sequence[str | None] | None = None
) -> tuple[Member, ...]:
    """Return members for data URLs; control ports default to the data port's neighbour, 8001.

    Raises:
        ValueError: There is no URL, one has no host, or the lists differ in length.
    """
    if isinstance(urls, str) or not urls:
        raise ValueError(f"urls must be a list of one URL or more, not {urls!r}")
    if control_urls is not None and len(control_urls) != len(urls):
        raise ValueError(f"{len(urls)} urls but {len(control_urls)} control_urls")
    controls = control_urls or [_control_port_of(url) for url in urls]
    found = {}
    for url, control in zip(urls, controls, strict=True):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL: write http://HOST:PORT")
        data = url.rstrip("/")
        control_url = control.rstrip("/") if control else None
        found[data] = Member(data, parts.netloc, control_url, proven=False)
    return tuple(found.values())


def _control_port_of(url: str) -> str | None:
    parts = urlsplit(url)
    if parts.port != DATA_PORT or not parts.hostname:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{CONTROL_PORT}"
