"""Who may use a member's control port with `--auth kubernetes`: the head of its own gang, nobody else.

It needs no right in the cluster. Its token is bound to its pod and issued for this pool, so it proves
which pod sent it. A token that was let in once is let in until it expires while the API server can't be
asked: else every gang would end, of its members' silence, when that is away for longer than answers are kept.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from pathlib import Path
from typing import Any

from rollout_common.wire.problems import ProblemError
from rollout_worker.gang.gang_addresses import head_pod_name
from rollout_worker.settings import InvalidSettings, WorkerSettings

from .access_rights import AccessRight, read_bearer_token
from .kubernetes_auth import KubernetesReview
from .settings import TOKEN_RETRY_SECONDS

POD_NAME = "authentication.kubernetes.io/pod-name"


class HeadTokenReview:
    """Asks the API server whose a token is."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._review = KubernetesReview(settings)
        self._account = own_service_account(settings.kube_token_file)
        self._pod = head_pod_name(settings)
        self._known = ""
        """The token that was let in last."""

    async def check_caller(
        self, authorization: str | None, right: AccessRight, address: str = ""
    ) -> str:
        """Let the head's pod in."""
        token = read_bearer_token(authorization)
        known = token == self._known and time.time() < token_expiry(token)
        try:
            async with asyncio.timeout(TOKEN_RETRY_SECONDS if known else None):
                user = await self._review.authenticate_caller(authorization, address)
        except (ProblemError, TimeoutError) as error:
            away = isinstance(error, TimeoutError) or error.slug == "auth-unavailable"
            if known and away:
                return self._pod
            raise
        pods = user.spec.get("extra", {}).get(POD_NAME, [])
        if user.name != self._account or pods != [self._pod]:
            raise ProblemError(
                "forbidden",
                f"{user.name} of pod {', '.join(pods) or 'none'} is not the head of this gang, which"
                f" is pod {self._pod!r} with {self._account}",
            )
        self._known = token
        return self._pod

    async def close(self) -> None:
        """Close the connections to the API server."""
        await self._review.close()


def own_service_account(token_file: Path) -> str:
    """Return the name of the service account that this pod's own token is of.

    Raises:
        BadSettings: it can't be read.
    """
    try:
        return str(_token_claims(token_file.read_text().strip())["sub"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidSettings(
            f"--kube-token-file {str(token_file)!r} holds no token of a service account: {error}"
        ) from error


def token_expiry(token: str) -> float:
    """Return when a token that the API server has accepted expires, as a Unix time; 0: it doesn't say."""
    try:
        return float(_token_claims(token)["exp"])
    except (ValueError, LookupError, TypeError):
        return 0.0


def _token_claims(token: str) -> Any:
    claims = token.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
