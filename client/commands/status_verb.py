"""`status` and `turns`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from datetime import UTC, datetime

from rollout_client.errors import ClusterError
from rollout_common.kube.access import Obj

from .command_output import EXIT_OK, print_json, print_text, progress_report
from .pool_access import LABEL_POOL, PoolAccess
from .pool_summary import render_summary, render_turns, summarize_pool, turns_of
from .settings import POLL_SECONDS


async def run_status(given: argparse.Namespace, pool: PoolAccess) -> int:
    """Print one pool, or all of the namespace; with `watch` again after each change."""
    shown, said = "", ""
    report = progress_report(True)
    while True:
        try:
            text, said = await _render_pools(given, pool), ""
            if text != shown:
                if given.watch and given.output == "text" and sys.stdout.isatty():
                    sys.stdout.write("\x1b[H\x1b[2J")
                print_text(text)
            shown = text
        except ClusterError as error:
            if not (given.watch and error.is_transient):
                raise
            if said != str(error):
                said = str(error)
                report(f"the API server: {said}")
        if not given.watch:
            return EXIT_OK
        await asyncio.sleep(POLL_SECONDS)


async def _render_pools(given: argparse.Namespace, pool: PoolAccess) -> str:
    found, unread = await _read_summaries(pool)
    if given.output == "json":
        return json.dumps(found[0] if pool.name else found, indent=2)
    text = "\n\n".join(map(render_summary, found)) or f"no pools in namespace {pool.namespace}"
    return text + (f"\nnot read: {unread}" if found and unread else "")


async def run_turns(given: argparse.Namespace, pool: PoolAccess) -> int:
    """Print which replicas hold, or wait for, the devices that they share with a trainer."""
    found = await pool.read_pool()
    if given.output == "json":
        print_json(turns_of(found))
    else:
        print_text(render_turns(found))
    return EXIT_OK


async def _read_summaries(pool: PoolAccess) -> tuple[list[Obj], str]:
    """Return the summaries of one pool, or of all, and why their pods could not be read; empty: they were."""
    if pool.name:
        found, (pods, unread) = await asyncio.gather(pool.read_pool(), _read_pods(pool))
        return [summarize_pool(found, pods, datetime.now(UTC))], unread
    pools = (await pool.kube.get(pool.collection)).get("items") or []
    pods, unread = await _read_pods(pool)
    return [
        summarize_pool(each, _pods_of(each, pods), datetime.now(UTC))
        for each in sorted(pools, key=lambda each: str(each["metadata"]["name"]))
    ], unread


async def _read_pods(pool: PoolAccess) -> tuple[list[Obj], str]:
    """Return the pods of one pool, or of all; without the right to read them none, and the refusal."""
    try:
        if pool.name:
            return await pool.read_pods(), ""
        return await pool.list_objects("pods", {"labelSelector": LABEL_POOL}), ""
    except ClusterError as error:
        if error.status != 403:
            raise
        return [], str(error)  # the chart's roles are for pools: the members are in their status


def _pods_of(pool: Obj, pods: list[Obj]) -> list[Obj]:
    name = pool["metadata"]["name"]
    return [pod for pod in pods if pod["metadata"]["labels"][LABEL_POOL] == name]
