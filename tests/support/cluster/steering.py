"""An account that may steer the workers of a pool itself, past the operator."""

from __future__ import annotations

import json

from rollout_operator.api import names
from tests.support.cluster.pools import Pool

ACCOUNT = "w-trainer"


def steering_token(pool: Pool) -> str:
    """Make the account `trainer`, which may steer workers itself; the chart's trainer may not."""
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": ACCOUNT},
    }
    group = "rbac.authorization.k8s.io"
    rules = [
        {"apiGroups": [names.GROUP], "resources": [f"{names.PLURAL}/weights"], "verbs": ["create"]},
        {
            "apiGroups": [names.GROUP],
            "resources": [f"{names.PLURAL}/control"],
            "verbs": ["get", "update"],
        },
    ]
    role = {
        "apiVersion": f"{group}/v1",
        "kind": "Role",
        "metadata": {"name": ACCOUNT},
        "rules": rules,
    }
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": ACCOUNT},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": ACCOUNT},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": pool.namespace}],
    }
    documents = {"apiVersion": "v1", "kind": "List", "items": [account, role, binding]}
    pool.kubectl("apply", "-f", "-", input=json.dumps(documents))
    audience = names.token_audience(pool.namespace, pool.name)
    return pool.kubectl(
        "create", "token", ACCOUNT, "--audience", audience, "--duration", "1h"
    ).strip()
