"""What the control port needs from a caller: a name, and the right that the route requires.

A route names that right as (subresource, verb) of `rolloutreplicas.rollout.dev`. In a cluster, RBAC
decides (`kubeauth`); otherwise anyone with the bearer token may do everything. A caller's holds are
listed under its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from rollout_common.wire.problems import ProblemError

Subresource = Literal["weights", "control"]
Verb = Literal["get", "create", "update"]


@dataclass(frozen=True, slots=True)
class AccessRight:
    """What a route requires: a verb on a subresource of the pool's RolloutReplica."""

    subresource: Subresource
    verb: Verb


SEE_STATE = AccessRight("control", "get")
CONTROL_WORKER = AccessRight("control", "update")
STAGE_WEIGHTS = AccessRight("weights", "create")


class Authorizer(Protocol):
    """Decides who is calling and whether they may."""

    async def check_caller(
        self, authorization: str | None, right: AccessRight, address: str = ""
    ) -> str:
        """Return the caller's name; `address` is where it calls from.

        Raises:
            ProblemError: 401 unknown caller, 403 not allowed, 503 can't be checked right now.
        """
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


def read_bearer_token(authorization: str | None) -> str:
    """Return the token of an Authorization header.

    Raises:
        ProblemError: 401 if there is none.
    """
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise unauthenticated_problem("send the header `Authorization: Bearer <token>`")
    return token.strip()


def unauthenticated_problem(detail: str) -> ProblemError:
    """A 401 problem."""
    return ProblemError("unauthenticated", detail)
