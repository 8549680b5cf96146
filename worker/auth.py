"""Who may use the control port: nobody without asking.

A route names what it needs as (subresource, verb) of `rolloutreplicas.rollout.dev`. With a bearer
token whoever has it may do everything; in a cluster RBAC decides (`kubeauth`). The caller's name is
the holder of its holds.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from .problems import ProblemError
from .settings import BadSettings, Settings

Subresource = Literal["weights", "control"]
Verb = Literal["get", "create", "update"]


@dataclass(frozen=True, slots=True)
class Right:
    """What a route needs: a verb on a subresource of the pool's RolloutReplica."""

    subresource: Subresource
    verb: Verb


SEE = Right("control", "get")
CONTROL = Right("control", "update")
STAGE = Right("weights", "create")


class Authorizer(Protocol):
    """Decides who calls and whether they may."""

    async def check(self, authorization: str | None, right: Right) -> str:
        """Return the caller's name.

        Raises:
            ProblemError: 401 nobody, 403 not this, 503 it can't be found out now.
        """
        ...

    async def close(self) -> None:
        """Free connections."""
        ...


class Anyone:
    """`--auth none`: whoever reaches the loopback port."""

    async def check(self, authorization: str | None, right: Right) -> str:
        """Everybody may."""
        return "anonymous"

    async def close(self) -> None:
        """Nothing to free."""


class BearerToken:
    """`--auth token`: one secret from a file, read again at each call so that it can be rotated."""

    def __init__(self, file: Path) -> None:
        self._file = file
        if not self._secret():
            raise BadSettings(f"--auth-token-file {str(file)!r} is empty: write a secret into it")

    def _secret(self) -> bytes:
        try:
            return self._file.read_bytes().strip()
        except OSError as error:
            raise BadSettings(
                f"--auth-token-file {str(self._file)!r} can't be read: {error.strerror}"
            ) from error

    async def check(self, authorization: str | None, right: Right) -> str:
        """Whoever has the token may do everything."""
        given = bearer(authorization)
        try:
            secret = self._secret()
        except BadSettings as error:
            raise ProblemError("auth-unavailable", str(error), retry_after=5) from error
        # Digests have one length, so that the comparison tells nothing about the secret's.
        same = hmac.compare_digest(_digest(given.encode()), _digest(secret))
        if not secret or not same:
            raise unauthenticated("the bearer token is not the one of --auth-token-file")
        return "token"

    async def close(self) -> None:
        """Nothing to free."""


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def bearer(authorization: str | None) -> str:
    """Return the token of an Authorization header.

    Raises:
        ProblemError: 401, there is none.
    """
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise unauthenticated("send the header `Authorization: Bearer <token>`")
    return token.strip()


def unauthenticated(detail: str) -> ProblemError:
    """A 401 with the header that belongs to it."""
    return ProblemError("unauthenticated", detail)


def make_authorizer(settings: Settings) -> Authorizer:
    """The authorizer of `--auth`.

    Raises:
        BadSettings: the token's file can't be used.
    """
    if settings.auth == "none":
        return Anyone()
    if settings.auth == "token":
        assert settings.auth_token_file is not None
        return BearerToken(settings.auth_token_file)
    from .kubeauth import KubernetesReview

    return KubernetesReview(settings)
