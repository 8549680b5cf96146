"""What tests of weights share: versions on a volume, answers of the data port, an account that steers workers."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import rollout_local
from rollout_operator.api import names
from tests.support.cluster.pools import Pool

Identity = tuple[int, int]
ACCOUNT = "w-trainer"


class Volume:
    """Folders of weights on the volume that the workers see, one for each version."""

    def __init__(self, prefix: str) -> None:
        self._root = rollout_local.make_models() / "weights"
        self._prefix = prefix
        self._numbers = count(1)

    def reserve(self) -> str:
        """A path that nobody used; nothing is there."""
        return f"{self._prefix}-{next(self._numbers)}"

    def publish(self, seed: str, path: str | None = None) -> str:
        """Put the bytes of `weights/<seed>` at a path; readers see the whole folder or none."""
        path = path or self.reserve()
        half = self._root / f".{path}"
        half.mkdir()
        for file in (self._root / seed).iterdir():
            os.link(file, half / file.name)
        half.rename(self._root / path)
        return path

    def cut_off(self, path: str) -> None:
        """Leave half of the file, as a publisher does that died."""
        file = self._root / path / "model.safetensors"
        half = file.read_bytes()[: file.stat().st_size // 2]
        file.unlink()  # it is a link: the others keep their bytes
        file.write_bytes(half)

    def remove(self, path: str) -> None:
        shutil.rmtree(self._root / path)

    def clean(self) -> None:
        """Remove all versions of this prefix, also those of a test run that was killed."""
        for folder in (
            *self._root.glob(f"{self._prefix}-*"),
            *self._root.glob(f".{self._prefix}-*"),
        ):
            shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the data port."""

    status: int
    body: dict[str, Any]
    ended: float

    @property
    def identities(self) -> list[Identity]:
        """Identities of the first output, in order."""
        return [(s["epoch"], s["version"]) for s in self.body["outputs"][0]["weights"]]


@dataclass(slots=True)
class Traffic:
    """Short requests without a pause, while the block runs."""

    replies: list[Reply] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def served(self) -> list[Identity]:
        """Identities in the order of their first answer."""
        ok = sorted((r for r in self.replies if r.status == 200), key=lambda r: r.ended)
        return list(dict.fromkeys(identity for r in ok for identity in r.identities))

    @property
    def refused(self) -> list[Reply]:
        """Answers other than 200."""
        return [r for r in self.replies if r.status != 200]


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
