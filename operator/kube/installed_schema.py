"""What the CRD in the cluster lacks of the status that this operator writes.

An API server that does not know a field of status refuses the whole of it. The schema is read from the
OpenAPI document, which everybody may read who is logged in; the CRD itself would need a permission.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from rollout_common.kube.errors import KubeError
from rollout_operator.api.crd import CRD_NAME, structural_schema
from rollout_operator.api.names import KIND
from rollout_operator.api.status import RolloutReplicaStatus

from .kube_client import KubeClient
from .settings import SCHEMA_CHECK_SECONDS, SCHEMA_RETRY_SECONDS

logger = logging.getLogger(__name__)

MAX_SHOWN_FIELDS = 5


def missing_fields(want: Mapping[str, Any], have: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield the fields and values of one structural schema that another one lacks."""
    if have.get("x-kubernetes-preserve-unknown-fields"):
        return
    known = have.get("properties") or {}
    for name, child in want.get("properties", {}).items():
        path = f"{where}.{name}"
        if name in known:
            yield from missing_fields(child, known[name], path)
        else:
            yield path
    if "items" in want:
        yield from missing_fields(want["items"], have.get("items") or {}, f"{where}[]")
    if "enum" in have:
        yield from (
            f"{where} {each!r}" for each in want.get("enum", ()) if each not in have["enum"]
        )


class InstalledSchema:
    """Compares the CRD in the cluster with ours, while `run` is running."""

    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube
        self._want = structural_schema(RolloutReplicaStatus)
        self._wrong: str | None = None

    def schema_problem(self) -> str | None:
        """Return what is wrong, as far as that is known."""
        return self._wrong

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            fits = await self.compare_schema()
            await asyncio.sleep(SCHEMA_CHECK_SECONDS if fits else SCHEMA_RETRY_SECONDS)

    async def compare_schema(self) -> bool:
        """Compare once; return whether the CRD is known to have all that is needed."""
        try:
            document = await self._kube.get_openapi()
        except KubeError as error:
            logger.debug("can't read the CRD's schema: %s", error)
            return False
        found = [
            f
            for have in _status_schemas(document)
            for f in missing_fields(self._want, have, "status")
        ]
        before, self._wrong = self._wrong, _missing_message(found) if found else None
        if self._wrong is not None and self._wrong != before:
            logger.error("%s", self._wrong)
        return not found


def _status_schemas(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Schemas of our kind's status; the document has the list's, too."""
    for schema in (document.get("components") or {}).get("schemas", {}).values():
        kinds = schema.get("x-kubernetes-group-version-kind") or ()
        if any(each.get("kind") == KIND for each in kinds):
            yield (schema.get("properties") or {}).get("status") or {}


def _missing_message(found: list[str]) -> str:
    more = f" and {len(found) - MAX_SHOWN_FIELDS} more" if len(found) > MAX_SHOWN_FIELDS else ""
    return (
        f"the CRD {CRD_NAME} in the cluster is older than this operator and lacks "
        f"{', '.join(found[:MAX_SHOWN_FIELDS])}{more}, so the API server refuses its status: apply the CRD of this release "
        "(crds.install=true, or as docs/runbook.md says under 'A write is refused')"
    )
