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


def run_hidden(program: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = ":".join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", HIDDEN + program],
        env={"PYTHONPATH": path, **environ}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_nothing_is_sent_unless_the_environment_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracing.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert not tracing.start_tracing("x")
    monkeypatch.setenv(tracing.ENDPOINTS[0], "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not tracing.start_tracing("x")


def test_without_opentelemetry_everything_works_and_nothing_is_traced() -> None:
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
"""
    done = run_hidden(program)
    assert done.returncode == 0, done.stderr


def test_an_endpoint_without_opentelemetry_says_what_to_install() -> None:
    endpoint = {tracing.ENDPOINTS[0]: "http://collector:4318"}
    done = run_hidden('tracing.start_tracing("x")', **endpoint)
    assert "TracingUnavailable: OTEL_EXPORTER_OTLP_ENDPOINT is set, but" in done.stderr
    assert "pip install 'rollout-operator[otel]', or unset it" in done.stderr


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


@pytest.mark.parametrize(("share", "flags"), [("1.0", "01"), ("0.0", "00")])
def test_an_update_is_sent_whole_or_not_at_all(share: str, flags: str) -> None:
    """By the decision of the sampler on its root, in a process of its own: OpenTelemetry is set up once in each."""
    program = """
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rollout_common import tracing
exporter = InMemorySpanExporter()
assert tracing.start_tracing("operator", exporter)
ids = tracing.update_ids("rl", "policy", 1, 7)
headers = ids.to_headers()
with tracing.open_span("commit", "client", parent=headers):
    pass
tracing.record_span("weights update", ids, 0, 1, {})
tracing.stop_tracing()
print(headers["traceparent"][-2:], len(exporter.get_finished_spans()))
"""
    path = ":".join(filter(None, sys.path))
    sampler = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": share}
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": path, **sampler},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [flags, "2" if flags == "01" else "0"]
