"""Authentication and rights of the control port: the modes of `--auth`.

A route names the right that it requires as (subresource, verb) of `rolloutreplicas.rollout.dev`. In a
cluster, RBAC decides (`kubernetes_auth`); otherwise any caller with the bearer token may do everything.
A caller's holds are listed under its name.
"""

from __future__ import annotations

import hashlib
import hmac
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from typing_extensions import override

from rollout_common.wire.problems import ProblemError
from rollout_worker.ports.settings import TOKEN_FILE_SECONDS
from rollout_worker.settings import InvalidSettings
from rollout_worker.threads import SharedCall


@dataclass(frozen=True, slots=True)
class AccessRight:
    """What a route requires: a verb on a subresource of the pool's RolloutReplica."""

    subresource: Literal["weights", "control"]
    verb: Literal["get", "create", "update"]


SEE_STATE = AccessRight("control", "get")
CONTROL_WORKER = AccessRight("control", "update")
STAGE_WEIGHTS = AccessRight("weights", "create")


class Authorizer(ABC):
    """Decides who is calling and whether they may."""

    @abstractmethod
    async def check_caller(
        self, authorization: str | None, right: AccessRight, address: str = ""
    ) -> str:
        """Return the caller's name; `address` is where it calls from.

        Raises:
            ProblemError: 401 unknown caller, 403 not allowed, 503 can't be checked right now.
        """

    async def close(self) -> None:  # noqa: B027  # most have none
        """Close connections."""


def read_bearer_token(authorization: str | None) -> str:
    """Return the token of an Authorization header.

    Raises:
        ProblemError: 401 if there is none.
    """
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise ProblemError("unauthenticated", "send the header `Authorization: Bearer <token>`")
    return token.strip()


class AllowAnyone(Authorizer):
    """`--auth none`: anyone that can reach the loopback port."""

    @override
    async def check_caller(
        self, authorization: str | None, right: AccessRight, address: str = ""
    ) -> str:
        return "anonymous"


class SharedToken(Authorizer):
    """One secret from a file that a flag names, read again at every call so that it can be rotated: `--auth token`."""

    def __init__(
        self, file: Path, seconds: float = TOKEN_FILE_SECONDS, flag: str = "--auth-token-file"
    ) -> None:
        self._file = file
        self._flag = flag
        self._seconds = seconds
        self._reading = SharedCall(self._read_secret, "token")
        secret = self._read_secret()
        if not secret:
            raise InvalidSettings(f"{flag} {str(file)!r} is empty: write a secret into it")
        if not (secret.isascii() and secret.decode().isprintable()):
            raise InvalidSettings(
                f"{flag} {str(file)!r} holds bytes that no header carries: write one line of ASCII into it,"
                " such as `openssl rand -hex 32` prints"
            )

    def _read_secret(self) -> bytes:
        try:
            return self._file.read_bytes().strip()
        except OSError as error:
            raise InvalidSettings(
                f"{self._flag} {str(self._file)!r} can't be read: {error.strerror}"
            ) from error

    @override
    async def check_caller(
        self, authorization: str | None, right: AccessRight, address: str = ""
    ) -> str:
        given = read_bearer_token(authorization)
        try:
            secret = await self._reading.get_result(self._seconds)
        except InvalidSettings as error:
            raise ProblemError("auth-unavailable", str(error), retry_after=5) from error
        except TimeoutError:
            late = f"{self._flag} {str(self._file)!r} was not read in {self._seconds:g} s"
            raise ProblemError("auth-unavailable", late, retry_after=5) from None
        # Digests have equal length, so the comparison does not reveal the secret's length.
        same = hmac.compare_digest(token_digest(given.encode()), token_digest(secret))
        if not secret or not same:
            raise ProblemError("unauthenticated", f"the bearer token does not match {self._flag}")
        return "token"


def token_digest(token: bytes) -> bytes:
    """A token's SHA-256: what may be compared and kept in memory."""
    return hashlib.sha256(token).digest()
