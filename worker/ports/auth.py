"""Who may use the control port: the modes of `--auth`."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from rollout_common.wire.problems import ProblemError
from rollout_worker.settings import InvalidSettings, WorkerSettings
from rollout_worker.threads import SharedCall

from .access_rights import AccessRight, Authorizer, read_bearer_token, unauthenticated_problem
from .settings import TOKEN_FILE_SECONDS


class AllowAnyone:
    """`--auth none`: anyone who can reach the loopback port."""

    async def check_caller(
        self, authorization: str | None, right: AccessRight, address: str = ""
    ) -> str:
        """Let everyone in."""
        return "anonymous"

    async def close(self) -> None:
        """Nothing to free."""


class SharedToken:
    """One secret from a file, reread at every call so that it can be rotated: `--auth token`.

    Args:
        file: Holds the secret.
        seconds: What reading it may take.
        flag: Which names the file.
    """

    def __init__(
        self, file: Path, seconds: float = TOKEN_FILE_SECONDS, flag: str = "--auth-token-file"
    ) -> None:
        self._file = file
        self._flag = flag
        self._seconds = seconds
        self._reading = SharedCall(self._read_secret, "token")
        if not self._read_secret():
            raise InvalidSettings(f"{flag} {str(file)!r} is empty: write a secret into it")

    def _read_secret(self) -> bytes:
        try:
            return self._file.read_bytes().strip()
        except OSError as error:
            raise InvalidSettings(
                f"{self._flag} {str(self._file)!r} can't be read: {error.strerror}"
            ) from error

    async def check_caller(
        self, authorization: str | None, right: AccessRight, address: str = ""
    ) -> str:
        """Let anyone with the token do everything."""
        given = read_bearer_token(authorization)
        try:
            secret = await self._reading.get_result(self._seconds)
        except InvalidSettings as error:
            raise ProblemError("auth-unavailable", str(error), retry_after=5) from error
        except TimeoutError:
            late = f"{self._flag} {str(self._file)!r} was not read in {self._seconds:g} s"
            raise ProblemError("auth-unavailable", late, retry_after=5) from None
        # Digests have equal length, so the comparison does not reveal the secret's length.
        same = hmac.compare_digest(_sha256_digest(given.encode()), _sha256_digest(secret))
        if not secret or not same:
            raise unauthenticated_problem(f"the bearer token does not match {self._flag}")
        return "token"

    async def close(self) -> None:
        """Nothing to free."""


def _sha256_digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def make_authorizer(settings: WorkerSettings) -> Authorizer:
    """The authorizer for `--auth`.

    Raises:
        BadSettings: the token file can't be used.
    """
    if settings.auth == "none":
        return AllowAnyone()
    if settings.auth == "token":
        assert settings.auth_token_file is not None
        return SharedToken(settings.auth_token_file)
    # Imported late: it brings an HTTP client that only clusters need.
    from .kubernetes_auth import KubernetesReview

    return KubernetesReview(settings)
