"""Whom the head trusts of those who say that they are its members: read again when the files change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from rollout_common.transfer.tls import marks_of, trusting
from rollout_worker.threads import SharedCall

from .settings import CERTIFICATE_CHECK_SECONDS

logger = logging.getLogger(__name__)


class MemberTrust:
    """What this pod itself shows, and who issued it: all pods of a pool have the same.

    Args:
        certificate: This pod's own; `ca.crt` beside it, if there is one, issued it.
        name: Of the thread that looks at the files.

    Raises:
        OSError: it can't be used.
    """

    def __init__(self, certificate: Path, name: str) -> None:
        self._certificate = certificate
        self._looking = SharedCall(self._read_context, name)
        self._seen = marks_of(certificate)
        self._trouble = ""
        self.context = trusting(certificate)

    async def renew_context(self) -> bool:
        """Whether `context` is another one now; files that can't be used change nothing."""
        try:
            found = await self._looking.get_result(CERTIFICATE_CHECK_SECONDS)
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

    def _read_context(self) -> ssl.SSLContext | None:
        """Return what the files say now, None if they are the same as before."""
        marks = marks_of(self._certificate)
        if marks == self._seen:
            return None
        context = trusting(self._certificate)
        self._seen = marks
        return context
