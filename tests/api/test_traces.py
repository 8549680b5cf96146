"""Tensors pushed to a pool through the operator: how often a replica is called, and the spans as a collector gets them.

The spans are the operator's, the workers' and the trainer's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from localkube import Cluster
from rollout_common.tracing import update_ids
from tests.support.api.pushlab import POOL

PROGRAM = Path(__file__).parents[1] / "support/api/traced_push.py"
NAMESPACE = "traces"
PROGRAM_SECONDS = 180


@dataclass(frozen=True)
class Seen:
    """A span as it came; ids in hex."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    links: tuple[str, ...]
    attributes: dict[str, str]
    failed: bool


def trace_push(cluster: Cluster, endpoint: str) -> list[int]:
    """Run the program, its spans going to this endpoint; return the calls that it counted."""
    path = os.pathsep.join(filter(None, sys.path))
    environ = {**os.environ, "PYTHONPATH": path, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    environ |= {**cluster.environment(), "OTEL_BSP_SCHEDULE_DELAY": "100"}
    command = [sys.executable, str(PROGRAM), cluster.settings.name, NAMESPACE]
    done = subprocess.run(
        command, env=environ, timeout=PROGRAM_SECONDS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    calls: list[int] = json.loads(done.stdout)
    return calls


@pytest.fixture(scope="module")
def pushed(crd: Cluster) -> tuple[list[int], list[Seen]]:
    """Calls of replicas for each push, and what a collector got of all and of one generation."""
    found: list[Seen] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers.get("Content-Encoding") is None
            found.extend(_read_spans(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        calls = trace_push(crd, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    return calls, found


@pytest.fixture(scope="module")
def spans(pushed: tuple[list[int], list[Seen]]) -> list[Seen]:
    return pushed[1]


def _read_spans(request: ExportTraceServiceRequest) -> Iterator[Seen]:
    for each in request.resource_spans:
        about = {a.key: a.value.string_value for a in each.resource.attributes}
        for scope in each.scope_spans:
            for span in scope.spans:
                yield Seen(
                    about["service.name"],
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    tuple(link.trace_id.hex() for link in span.links),
                    {a.key: a.value.string_value for a in span.attributes},
                    span.status.code == span.status.STATUS_CODE_ERROR,
                )


def named(spans: list[Seen], name: str, trace: str = "") -> list[Seen]:
    found = [span for span in spans if span.name == name and trace in ("", span.trace)]
    assert found, f"no span {name!r} of {sorted({span.name for span in spans})}"
    return found


def test_an_update_takes_four_calls_of_each_replica(pushed: tuple[list[int], list[Seen]]) -> None:
    """Its state, stage, a look, commit."""
    calls, _ = pushed
    assert len(calls) >= 16
    # A pool that rests is asked every few seconds, too, and that may fall into an update.
    assert median(calls) <= 4
    assert sum(calls) <= 4.5 * len(calls)


FIRST = update_ids(NAMESPACE, POOL, 1, 1)
TRACE = f"{FIRST.trace_id:032x}"


def test_an_update_is_one_trace_of_operator_and_workers(spans: list[Seen]) -> None:
    (update,) = named(spans, "weights update", TRACE)
    assert (update.id, update.parent) == (f"{FIRST.span_id:016x}", "")
    assert (update.attributes["rollout.outcome"], update.failed) == ("Complete", False)
    calls = named(spans, "commit", TRACE)
    assert {call.parent for call in calls} == {update.id}
    assert {call.attributes["k8s.pod.name"] for call in calls} == {f"{POOL}-0-0", f"{POOL}-1-0"}
    served = named(spans, "POST /v1/weights/commit", TRACE)
    assert {span.service for span in served} == {"rollout-worker"}
    assert {span.parent for span in served} == {call.id for call in calls}
    tree = [span for span in spans if span.trace == TRACE]
    assert {span.parent for span in tree} <= {"", *(span.id for span in tree)}, (
        "each parent is there"
    )


def test_a_trainers_publish_leads_to_the_update(spans: list[Seen]) -> None:
    (publish,) = (span for span in named(spans, "publish_weights") if TRACE in span.links)
    assert publish.links == (TRACE,)
    assert publish.trace != TRACE, "it may be a part of the trainer's own trace"
    staged = named(spans, "POST /v1/weights/stage")
    assert publish.trace in {span.trace for span in staged}, "the trainer opens the slots itself"


def test_a_request_is_one_trace_of_trainer_and_worker(spans: list[Seen]) -> None:
    (call,) = named(spans, "generate")
    (attempt,) = named(spans, "attempt")
    (served,) = named(spans, "POST /v1/generate")
    assert (call.parent, attempt.parent, served.parent) == ("", call.id, attempt.id)
    whole = call.attributes["rollout.request_id"]
    assert served.attributes["rollout.request_id"] == f"{whole}.a0", "the first attempt"
    assert "rollout.weights" in served.attributes


def test_looks_have_no_span(spans: list[Seen]) -> None:
    """Workers are asked for their state all the time."""
    assert not [span for span in spans if "/v1/state" in span.name or span.name == "state"]
