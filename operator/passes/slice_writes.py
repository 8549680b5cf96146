"""Writes the EndpointSlices of a Hybrid pool: only what differs, and only what is ours."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Final

from rollout_operator.api.objects import Obj
from rollout_operator.core.observed_pool import Pod
from rollout_operator.core.services import pool_slices, slice_difference, slice_patch

from .pool_writer import PoolWriter

logger = logging.getLogger(__name__)

SLICES: Final = "endpointslices"


async def write_slices(writer: PoolWriter, members: Iterable[Pod]) -> bool:
    """Have the slices show these members; return whether anything was written."""
    key, stored = writer.key, writer.ctx.store.pool_slices(writer.key)
    there = {o["metadata"]["name"]: o for o in stored if writer.is_ours(o)}
    going = {o["metadata"]["name"] for o in stored if writer.will_be_deleted(o)}
    wrote = False
    for want in pool_slices(key.name, key.namespace, writer.uid, members, there.values()):
        name = want["metadata"]["name"]
        have = there.get(name)
        if name in going or (have is not None and slice_difference(want, have) is None):
            continue
        if have is None:
            have = await writer.create_child(SLICES, want)
            wrote = wrote or have is not None
        # Made by us, and the watch does not show it.
        if have is not None and slice_difference(want, have):
            wrote = await _rewrite_slice(writer, want, have) or wrote
    return wrote


async def _rewrite_slice(writer: PoolWriter, want: Obj, have: Obj) -> bool:
    name = want["metadata"]["name"]
    rewrite = partial(_send_slice_patch, writer, want, have)
    what = f"the change of endpointslice {name!r}"
    return bool(await writer.run_guarded(f"repair {name}", what, ("patch", SLICES), rewrite))


async def _send_slice_patch(writer: PoolWriter, want: Obj, have: Obj) -> bool:
    name, changed = want["metadata"]["name"], slice_difference(want, have)
    answer = await writer.ctx.kube.patch(
        SLICES, writer.key.namespace, name, slice_patch(want, have), kind="merge"
    )
    writer.ctx.store.upsert_written(SLICES, answer)
    logger.info("wrote EndpointSlice %s: %s", name, changed, extra={"pool": str(writer.key)})
    return True
