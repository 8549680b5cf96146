"""Whether a member lets its head in while nobody can be asked whose the token is."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollout_common.wire.problems import ProblemError
from rollout_worker.ports.callers import kubernetes_auth
from rollout_worker.ports.callers.auth import CONTROL_WORKER
from rollout_worker.ports.callers.kubernetes_auth import HeadTokenReview, TokenUser
from tests.support.unit.tiny_worker import refused, settings

ACCOUNT = "system:serviceaccount:ns:worker"
AWAY = ProblemError("auth-unavailable", "the Kubernetes API could not review the caller")


def token(**claims: object) -> str:
    """A token with these claims, which nobody signed."""
    return f"h.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.s"


class Cluster:
    """Knows whose tokens are, or can't be asked."""

    def __init__(self) -> None:
        self.user: TokenUser | Exception = TokenUser(
            ACCOUNT, {"extra": {kubernetes_auth.POD_NAME: ["math-0-0"]}}
        )
        self.hangs = False

    async def authenticate_caller(self, authorization: str | None, address: str) -> TokenUser:
        if self.hangs:
            await asyncio.Event().wait()
        if isinstance(self.user, Exception):
            raise self.user
        return self.user

    async def close(self) -> None:
        """Nothing to free."""


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
async def member(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[HeadTokenReview]:
    (tmp_path / "token").write_text(token(sub=ACCOUNT))
    monkeypatch.setattr(kubernetes_auth, "KubernetesReview", lambda _: cluster)
    monkeypatch.setattr(kubernetes_auth, "TOKEN_RETRY_SECONDS", 0.05)
    flags = ("--nodes", "2", "--rank", "1", "--leader-address", "math-0-0.math-heads")
    found = HeadTokenReview(settings(*flags, "--kube-token-file", str(tmp_path / "token")))
    yield found
    await found.close()


async def test_a_head_that_was_let_in_stays_while_the_api_server_is_away(
    cluster: Cluster, member: HeadTokenReview
) -> None:
    mine = f"Bearer {token(exp=time.time() + 60)}"
    assert await member.check_caller(mine, CONTROL_WORKER) == "math-0-0"
    cluster.user = AWAY
    assert await member.check_caller(mine, CONTROL_WORKER) == "math-0-0"
    cluster.hangs = True
    assert await asyncio.wait_for(member.check_caller(mine, CONTROL_WORKER), 5) == "math-0-0"


async def test_nobody_else_is_let_in_meanwhile(cluster: Cluster, member: HeadTokenReview) -> None:
    mine, late = (f"Bearer {token(exp=time.time() + seconds)}" for seconds in (60, -1))
    for each in (late, mine):
        await member.check_caller(each, CONTROL_WORKER)
    cluster.user = AWAY
    for other in (late, f"Bearer {token(exp=time.time() + 61)}"):
        with refused("auth-unavailable"):
            await member.check_caller(other, CONTROL_WORKER)
    cluster.user = ProblemError("unauthenticated", "its pod is gone")
    with refused("unauthenticated"):
        await member.check_caller(mine, CONTROL_WORKER)


async def test_an_expired_token_is_worth_nothing_then(
    cluster: Cluster, member: HeadTokenReview
) -> None:
    late = f"Bearer {token(exp=time.time() - 1)}"
    await member.check_caller(late, CONTROL_WORKER)
    cluster.user = AWAY
    with refused("auth-unavailable"):
        await member.check_caller(late, CONTROL_WORKER)


async def test_another_pods_token_is_never_known(cluster: Cluster, member: HeadTokenReview) -> None:
    other = f"Bearer {token(exp=time.time() + 60)}"
    cluster.user = TokenUser(ACCOUNT, {"extra": {kubernetes_auth.POD_NAME: ["math-1-0"]}})
    with refused("forbidden"):
        await member.check_caller(other, CONTROL_WORKER)
    cluster.user = AWAY
    with refused("auth-unavailable"):
        await member.check_caller(other, CONTROL_WORKER)
