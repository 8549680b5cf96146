"""Whom the head trusts of those who say that they are its members: read again when the files change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from rollout_worker.threads import Shared

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""What a look at the files may take."""
Mark = tuple[int, int] | None
"""Of a file: which one it is and when it was written; None: there is none."""


class Trust:
    """What this pod itself shows, and who issued it: all pods of a pool have the same.

    Args:
        certificate: This pod's own; `ca.crt` beside it, if there is one, issued it.
        name: Of the thread that looks at the files.

    Raises:
        OSError: it can't be used.
    """

    def __init__(self, certificate: Path, name: str) -> None:
        self._files = (certificate, certificate.parent / "ca.crt")
        self._looking = Shared(self._look, name)
        self._seen = self._marks()
        self._trouble = ""
        self.context = self._read()

    async def renewed(self) -> bool:
        """Whether `context` is another one now; files that can't be used change nothing."""
        try:
            found = await self._looking.get(LOOK_SECONDS)
        except OSError as error:  # a TimeoutError is one, and ssl's errors are
            if str(error) != self._trouble:
                logger.warning("the head trusts whom it trusted before: %s", error)
            self._trouble = str(error)
            return False
        self._trouble = ""
        if found is None:
            return False
        self.context = found
        return True

    def _look(self) -> ssl.SSLContext | None:
        """Return what the files say now, None if they are the same as before."""
        marks = self._marks()
        if marks == self._seen:
            return None
        context = self._read()
        self._seen = marks
        return context

    def _marks(self) -> tuple[Mark, ...]:
        return tuple(map(_mark, self._files))

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        own, issuer = self._files
        context.load_verify_locations(own)
        if issuer.exists():
            context.load_verify_locations(issuer)
        return context


def _mark(file: Path) -> Mark:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns
