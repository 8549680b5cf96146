"""`collect`: all that is known of a pool in one archive, without secrets, to attach to a report."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

from rollout_common.kube.access import Obj

from .archive_redaction import redact_object, redact_text
from .cause_finding import find_causes
from .command_output import EXIT_OK, CommandFailed, print_text, progress_report
from .pool_access import PoolAccess
from .pool_facts import OPERATOR_NAME, FactReader, PoolFacts
from .pool_summary import render_summary, summarize_pool
from .why_verb import render_causes

LOG_LINES, POD_LIMIT = 5000, 200
"""Some 100 MB at most."""


async def run_collect(given: argparse.Namespace, pool: PoolAccess) -> int:
    """Write the archive and print its name."""
    report = progress_report(given.progress)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    target = given.file or Path(f"rollout-{pool.namespace}-{pool.name}-{stamp}.tar.gz")
    reader = FactReader(pool, given.operator_namespace, LOG_LINES, POD_LIMIT, given.token_file)
    report("reading objects, events, states and logs")
    facts = await reader.read_facts()
    report("reading metrics and the operator's log")
    more, operator = await asyncio.gather(
        _read_metrics(reader, pool, facts),
        _read_operator(reader, pool, given.operator_namespace),
    )
    content = archive_content(facts, {**more, **operator})
    try:
        write_archive(target, content)
    except OSError as error:
        raise CommandFailed(
            f"{target} can't be written: {error.strerror}; give another --file"
        ) from error
    print_text(
        f"{target}: {len(content)} files, secrets redacted; look through it before you share it"
    )
    return EXIT_OK


def archive_content(facts: PoolFacts, texts: Mapping[str, str]) -> dict[str, str]:
    """Return the archive's files by name, without secrets. Pure."""
    summary = render_summary(summarize_pool(facts.pool, facts.pods, facts.now))
    objects = {
        "pool.json": facts.pool,
        "pods.json": facts.pods,
        "events.json": facts.events,
        "nodes.json": list(facts.nodes.values()),
        "leases.json": facts.leases,
        "states.json": dict(facts.states),
    }
    written = {
        "summary.txt": f"{summary}\n\n{render_causes(facts, find_causes(facts))}\n",
        "unread.txt": "".join(f"{line}\n" for line in facts.unread),
        **{f"logs/{name}.log": log for name, log in facts.logs.items()},
        **texts,
    }
    return {
        **{name: json.dumps(redact_object(each), indent=1) for name, each in objects.items()},
        **{name: redact_text(text) for name, text in written.items()},
    }


def write_archive(target: Path, content: Mapping[str, str]) -> None:
    """Write a new .tar.gz that only its owner may read.

    Raises:
        OSError: It can't be written, or exists.
    """
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    folder = target.name.removesuffix(".tar.gz")
    try:
        with (
            os.fdopen(descriptor, "wb") as file,
            tarfile.open(fileobj=file, mode="w:gz") as archive,
        ):
            for name, text in content.items():
                data = text.encode(errors="replace")
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                archive.addfile(entry, io.BytesIO(data))
    except BaseException:  # the disk is full, or Ctrl-C: a part of it would be taken for all
        target.unlink()
        raise


async def _read_metrics(reader: FactReader, pool: PoolAccess, facts: PoolFacts) -> dict[str, str]:
    async def read_page(pod: Obj) -> tuple[str, str]:
        name = str(pod["metadata"]["name"])
        path = f"/api/v1/namespaces/{pool.namespace}/pods/{name}:8000/proxy/metrics"
        page = await reader.attempt_read(f"metrics of {name}", pool.kube.get_text(path), "")
        return f"metrics/{name}.txt", page

    running = [pod for pod in facts.pods if (pod.get("status") or {}).get("phase") == "Running"]
    found = await asyncio.gather(*map(read_page, running))
    return {name: page for name, page in found if page}


async def _read_operator(reader: FactReader, pool: PoolAccess, namespace: str) -> dict[str, str]:
    selector = {"labelSelector": f"app.kubernetes.io/name={OPERATOR_NAME}"}
    reading = pool.list_objects("pods", selector, namespace)
    found: dict[str, str] = {}
    for pod in await reader.attempt_read(f"the operator's pods in {namespace}", reading, []):
        name = str(pod["metadata"]["name"])
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/log"
        log = pool.kube.get_text(path, {"tailLines": str(LOG_LINES)})
        found[f"operator/{name}.log"] = await reader.attempt_read(f"log of {name}", log, "")
        found[f"operator/{name}.json"] = json.dumps(redact_object(pod), indent=1)
    return found
