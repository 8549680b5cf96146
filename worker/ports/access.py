"""What the control port asks of a caller: a name, and the right that a route needs.

A route names what it needs as (subresource, verb) of `rolloutreplicas.rollout.dev`. With a bearer
token whoever has it may do everything; in a cluster RBAC decides (`kubeauth`). The caller's name is
the holder of its holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from rollout_worker.wire.problems import ProblemError

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
