"""Who may use the control port: the modes of `--auth`."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from rollout_worker.settings import BadSettings, Settings
from rollout_worker.threads import Shared
from rollout_worker.wire.problems import ProblemError

from .access import Authorizer, Right, bearer, unauthenticated


class Anyone:
    """`--auth none`: anyone who can reach the loopback port."""

    async def check(self, authorization: str | None, right: Right, address: str = "") -> str:
        """Let everyone in."""
        return "anonymous"

    async def close(self) -> None:
        """Nothing to free."""


FILE_SECONDS = 5.0
"""What a file with a token may take to be read."""


class BearerToken:
    """One secret from a file, reread at every call so that it can be rotated: `--auth token`.

    Args:
        file: Holds the secret.
        seconds: What reading it may take.
        flag: Which names the file.
    """

    def __init__(
        self, file: Path, seconds: float = FILE_SECONDS, flag: str = "--auth-token-file"
    ) -> None:
        self._file = file
        self._flag = flag
        self._seconds = seconds
        self._reading = Shared(self._secret, "token")
        if not self._secret():
            raise BadSettings(f"{flag} {str(file)!r} is empty: write a secret into it")

    def _secret(self) -> bytes:
        try:
            return self._file.read_bytes().strip()
        except OSError as error:
            raise BadSettings(
                f"{self._flag} {str(self._file)!r} can't be read: {error.strerror}"
            ) from error

    async def check(self, authorization: str | None, right: Right, address: str = "") -> str:
        """Let anyone with the token do everything."""
        given = bearer(authorization)
        try:
            secret = await self._reading.get(self._seconds)
        except BadSettings as error:
            raise ProblemError("auth-unavailable", str(error), retry_after=5) from error
        except TimeoutError:
            late = f"{self._flag} {str(self._file)!r} was not read in {self._seconds:g} s"
            raise ProblemError("auth-unavailable", late, retry_after=5) from None
        # Digests have equal length, so the comparison does not reveal the secret's length.
        same = hmac.compare_digest(_digest(given.encode()), _digest(secret))
        if not secret or not same:
            raise unauthenticated(f"the bearer token does not match {self._flag}")
        return "token"

    async def close(self) -> None:
        """Nothing to free."""


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def make_authorizer(settings: Settings) -> Authorizer:
    """The authorizer for `--auth`.

    Raises:
        BadSettings: the token file can't be used.
    """
    if settings.auth == "none":
        return Anyone()
    if settings.auth == "token":
        assert settings.auth_token_file is not None
        return BearerToken(settings.auth_token_file)
    # Imported late: it brings an HTTP client that only clusters need.
    from .kubeauth import KubernetesReview

    return KubernetesReview(settings)
