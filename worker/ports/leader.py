"""Who may use a member's control port with `--auth kubernetes`: the head of its own gang, nobody else.

It needs no right in the cluster. Its token is bound to its pod and issued for this pool, so it proves
which pod sent it.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from rollout_worker.gang.places import leader_pod
from rollout_worker.settings import BadSettings, Settings
from rollout_worker.wire.problems import ProblemError

from .access import Right
from .kubeauth import KubernetesReview

POD_NAME = "authentication.kubernetes.io/pod-name"


class LeaderReview:
    """Asks the API server whose a token is."""

    def __init__(self, settings: Settings) -> None:
        self._review = KubernetesReview(settings)
        self._account = own_account(settings.kube_token_file)
        self._pod = leader_pod(settings)

    async def check(self, authorization: str | None, right: Right, address: str = "") -> str:
        """Let the head's pod in."""
        user = await self._review.authenticate(authorization, address)
        pods = user.spec.get("extra", {}).get(POD_NAME, [])
        if user.name != self._account or pods != [self._pod]:
            raise ProblemError(
                "forbidden",
                f"{user.name} of pod {', '.join(pods) or 'none'} is not the head of this gang, which"
                f" is pod {self._pod!r} with {self._account}",
            )
        return self._pod

    async def close(self) -> None:
        """Close the connections to the API server."""
        await self._review.close()


def own_account(token_file: Path) -> str:
    """Return the name of the service account that this pod's own token is of.

    Raises:
        BadSettings: it can't be read.
    """
    try:
        claims = token_file.read_text().strip().split(".")[1]
        padded = claims + "=" * (-len(claims) % 4)
        return str(json.loads(base64.urlsafe_b64decode(padded))["sub"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BadSettings(
            f"--kube-token-file {str(token_file)!r} holds no token of a service account: {error}"
        ) from error
