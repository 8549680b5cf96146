"""Spans: nothing without an endpoint, a sentence without OpenTelemetry, ids that every process can make."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from rollout_common import tracing

HIDDEN = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Hide())
from rollout_common import tracing
"""
"""As if the extra were not installed."""


def run_program(program: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own: OpenTelemetry can be set up once in each."""
    path = ":".join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": path, **environ}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_nothing_is_sent_unless_the_environment_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracing.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert not tracing.start_tracing("x")
    monkeypatch.setenv(tracing.ENDPOINTS[0], "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not tracing.start_tracing("x")


def test_without_opentelemetry_nothing_is_traced_and_an_endpoint_says_what_to_install() -> None:
    program = """
headers = {}
with tracing.open_span("x", attributes={"a": 1}) as span:
    assert span is None
    tracing.add_trace_header(headers)
    tracing.note_attributes({"b": 2})
    tracing.link_span(tracing.update_ids("rl", "p", 1, 2))
tracing.record_span("y", tracing.update_ids("rl", "p", 1, 2), 0, 1, {})
tracing.stop_tracing()
assert not headers and not tracing.is_recording() and not tracing.start_tracing("x")
import os
os.environ[tracing.ENDPOINTS[0]] = "http://collector:4318"
print("up to here")
tracing.start_tracing("x")
"""
    done = run_program(HIDDEN + program)
    assert done.stdout == "up to here\n", done.stderr
    assert "TracingUnavailable: OTEL_EXPORTER_OTLP_ENDPOINT is set, but" in done.stderr
    assert "run pip install '.[otel]' in a checkout of Rollout, or unset it" in done.stderr


def test_ids_of_an_update_are_the_same_everywhere_and_differ_by_pool_and_version() -> None:
    ids = tracing.update_ids("rl", "policy", 1, 7)
    assert ids == tracing.update_ids("rl", "policy", 1, 7)
    others = [
        ("rl", "policy", 1, 8),
        ("rl", "policy", 2, 7),
        ("rl", "other", 1, 7),
        ("x", "policy", 1, 7),
    ]
    assert len({ids, *(tracing.update_ids(*each) for each in others)}) == 5
    version, trace, span, flags = ids.to_headers()["traceparent"].split("-")
    assert (version, len(trace), len(span), flags) == ("00", 32, 16, "01")
    assert (int(trace, 16), int(span, 16)) == ids


def test_a_context_that_came_is_passed_on_by_those_who_send_no_spans() -> None:
    importlib.import_module("opentelemetry.trace")
    given = tracing.update_ids("rl", "policy", 1, 7).to_headers()
    with tracing.open_span("commit", "client", parent=given):
        headers: dict[str, str] = {}
        tracing.add_trace_header(headers)
    assert headers == given


TRACED = """
import asyncio, contextlib
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rollout_common import tracing
exporter = InMemorySpanExporter()
assert tracing.start_tracing("operator", exporter)
"""


def run_traced(program: str, **environ: str) -> str:
    """Run a program whose spans stay in `exporter`; return what it prints."""
    done = run_program(TRACED + program, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("share", "flags"), [("1.0", "01"), ("0.0", "00")])
def test_an_update_is_sent_whole_or_not_at_all(share: str, flags: str) -> None:
    program = """
ids = tracing.update_ids("rl", "policy", 1, 7)
headers = ids.to_headers()
with tracing.open_span("commit", "client", parent=headers):
    pass
tracing.record_span("weights update", ids, 0, 1, {})
tracing.stop_tracing()
print(headers["traceparent"][-2:], len(exporter.get_finished_spans()))
"""
    sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": share}
    found = run_traced(program, OTEL_PROPAGATORS="none", **sampler)
    assert found.split() == [flags, "2" if flags == "01" else "0"]


def test_requests_are_named_by_their_route_and_what_failed_is_an_error() -> None:
    program = """
import httpx
from fastapi import Response
from rollout_worker.ports.port_app import new_app
app = new_app("t", "t", limits=lambda: None)
@app.post("/v1/turn/{attempt}/use")
async def use(attempt: str) -> Response:
    return Response(status_code=503 if attempt == "7" else 200)
async def act():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://w") as client:
        for path in ("/v1/turn/6/use", "/v1/turn/7/use", "/made/up"):
            await client.post(path)
        await client.get("/v1/turn/6/use")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            with tracing.open_span("slow"):
                await asyncio.sleep(60)
    with contextlib.suppress(ValueError), tracing.open_span("wrong"):
        raise ValueError("no")
    with tracing.open_span("well"):
        pass
asyncio.run(act())
tracing.stop_tracing()
for span in exporter.get_finished_spans():
    status = span.attributes.get("http.response.status_code", "")
    print(span.name, status, span.status.status_code.name)
"""
    named = "POST /v1/turn/{attempt}/use"
    assert run_traced(program).splitlines() == [
        f"{named} 200 UNSET",
        f"{named} 503 ERROR",
        "POST 404 UNSET",
        "slow  ERROR",
        "wrong  ERROR",
        "well  UNSET",
    ]


def test_a_collector_that_does_not_answer_keeps_no_process_from_ending() -> None:
    program = """
import time
tracing.STOP_TRACING_SECONDS = 0.3
with tracing.open_span("last"):
    pass
exporter.export = lambda spans: time.sleep(60)
began = time.monotonic()
tracing.stop_tracing()
print(time.monotonic() - began)
"""
    assert 0.2 < float(run_traced(program)) < 3


def test_wrong_variables_of_opentelemetry_are_named() -> None:
    wrong = {
        tracing.ENDPOINTS[1]: "http://collector:4318",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "99999",
    }
    program = 'from rollout_common import tracing; tracing.start_tracing("x")'
    done = run_program(program, **wrong)
    assert "TracingUnavailable: OpenTelemetry refuses its settings" in done.stderr
    assert f"or unset {tracing.ENDPOINTS[1]}" in done.stderr
