"""Spans for OpenTelemetry, if it is installed and the environment names a collector; else nothing happens, at no cost worth naming.

Operator and workers send spans by OTLP over HTTP if `OTEL_EXPORTER_OTLP_ENDPOINT` (or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`)
is set; OpenTelemetry's variables for resources, sampling, batches and the exporter hold, too. A trainer's process sets OpenTelemetry up itself, and the client
adds to what is there. Contexts travel as the header `traceparent` (W3C Trace Context).

An update of weights has the same trace in each process that takes part: its ids are made of the pool and the version.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .settings import STOP_TRACING_SECONDS

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
SCOPE = "rollout"
"""Name of the instrumentation scope of all our spans."""

SpanKind = Literal["internal", "server", "client"]
Attributes = Mapping[str, str | int | float | bool | Sequence[str]]


class TracingUnavailable(Exception):
    """Spans are wanted, but what sends them is not installed."""


class SpanIds(NamedTuple):
    """The ids of a span that is known before it is made."""

    trace_id: int
    span_id: int

    def to_headers(self) -> dict[str, str]:
        """Return the headers of what happens within the span; it is sent if this process's sampler sends the span."""
        sampled, trace = True, _trace_api()
        if trace is not None and hasattr(provider := trace.get_tracer_provider(), "sampler"):
            sampled = provider.sampler.should_sample(None, self.trace_id, "").decision.is_sampled()
        return {"traceparent": f"00-{self.trace_id:032x}-{self.span_id:016x}-{sampled:02x}"}


def _trace_api() -> Any:
    """Return `opentelemetry.trace` if anything in this process uses it, else None: to import it takes 0.1 s."""
    return sys.modules.get("opentelemetry.trace")


@cache
def _propagator() -> Any:
    """Return what reads and writes `traceparent`, whatever `OTEL_PROPAGATORS` says: all of our processes must agree."""
    found = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
    return found.TraceContextTextMapPropagator()


_chosen_ids: ContextVar[SpanIds | None] = ContextVar("chosen_ids", default=None)
started = False
"""Whether `start_tracing` has set this process up."""


def start_tracing(service: str, exporter: SpanExporter | None = None) -> bool:
    """Send this process's spans from now on, if the environment says where to; return whether it does.

    Args:
        service: `service.name` of the process, unless the environment names it.
        exporter: Takes the spans, whatever the environment says; None: OTLP over HTTP does.

    Raises:
        TracingUnavailable: It says where, but the extra `otel` is not installed, or refuses its variables.
    """
    global started
    endpoint = next(filter(os.environ.get, ENDPOINTS), None)
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if exporter is None and (endpoint is None or disabled):
        return False
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    except ImportError as error:
        raise TracingUnavailable(
            f"{endpoint} is set, but OpenTelemetry is not installed ({error}):"
            " run pip install '.[otel]' in a checkout of Rollout, or unset it"
        ) from error

    class ChosenIds(RandomIdGenerator):
        """Gives a span the ids that others know already."""

        def generate_trace_id(self) -> int:
            chosen = _chosen_ids.get()
            return super().generate_trace_id() if chosen is None else chosen.trace_id

        def generate_span_id(self) -> int:
            chosen = _chosen_ids.get()
            return super().generate_span_id() if chosen is None else chosen.span_id

    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create({} if named else {"service.name": service})
    # `stop_tracing` ends it: by itself it would wait for half a minute at the end of the process.
    provider = TracerProvider(resource=resource, id_generator=ChosenIds(), shutdown_on_exit=False)
    try:
        provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
    except ValueError as error:
        raise TracingUnavailable(
            f"OpenTelemetry refuses its settings ({error}): correct the variables OTEL_…, or unset {endpoint}"
        ) from error
    trace.set_tracer_provider(provider)
    started = True
    return True


def stop_tracing() -> None:
    """Send what has not been sent, for some seconds at most: the last act of a process that `start_tracing` was called in."""
    if (trace := _trace_api()) is None or not started:
        return
    sending = Thread(target=trace.get_tracer_provider().shutdown, daemon=True)
    sending.start()
    sending.join(STOP_TRACING_SECONDS)


@contextmanager
def _span(
    name: str, kind: SpanKind, parent: Mapping[str, str] | None, attributes: Attributes
) -> Iterator[Span]:
    trace = _trace_api()
    context = None if parent is None else _propagator().extract(parent)
    with trace.get_tracer(SCOPE).start_as_current_span(
        name, context, trace.SpanKind[kind.upper()], attributes
    ) as span:
        try:
            yield span
        except asyncio.CancelledError:  # also what a deadline looks like in here
            span.set_status(trace.Status(trace.StatusCode.ERROR, "cancelled, or out of time"))
            raise


def open_span(
    name: str,
    kind: SpanKind = "internal",
    *,
    parent: Mapping[str, str] | None = None,
    attributes: Attributes = {},  # noqa: B006 - never changed
) -> AbstractContextManager[Span | None]:
    """Return a context manager within which a span is the current one; an exception, or its cancellation, marks it as failed.

    Args:
        name: Of the kind of work, not of one piece of it.
        kind: Whether this process does its own work, serves a caller, or calls another process.
        parent: Headers of the request that it belongs to; None: the current span.
        attributes: What sets it apart.
    """
    return nullcontext() if _trace_api() is None else _span(name, kind, parent, attributes)


def note_attributes(attributes: Attributes) -> None:
    """Add attributes to the current span."""
    if (trace := _trace_api()) is not None:
        trace.get_current_span().set_attributes(attributes)


def is_recording() -> bool:
    """Return whether the current span is sent, so that it is worth making attributes for it."""
    trace = _trace_api()
    return trace is not None and trace.get_current_span().is_recording()


def link_span(ids: SpanIds) -> None:
    """Link the current span to one of another trace."""
    if (trace := _trace_api()) is not None:
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        other = trace.SpanContext(ids.trace_id, ids.span_id, is_remote=True, trace_flags=flags)
        trace.get_current_span().add_link(other)


def add_trace_header(headers: MutableMapping[str, str]) -> None:
    """Add the current span's `traceparent`, if there is one."""
    if _trace_api() is not None:
        _propagator().inject(headers)


def update_ids(namespace: str, pool: str, epoch: int, version: int) -> SpanIds:
    """Return the ids of the span of a weights update, which every process can make for itself."""
    digest = hashlib.sha256(f"{namespace}/{pool}/{epoch}/{version}".encode()).digest()
    return SpanIds(int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:24]) or 1)


def record_span(
    name: str, ids: SpanIds, began: float, ended: float, attributes: Attributes, error: str = ""
) -> None:
    """Send a span that is over already, under ids that others have used as its context; it has no parent.

    `began` and `ended` are wall-clock seconds; `error`: why the work failed; empty: it did not.
    """
    if (trace := _trace_api()) is None:
        return
    token = _chosen_ids.set(ids)
    try:
        span = trace.get_tracer(SCOPE).start_span(
            name,
            trace.set_span_in_context(trace.INVALID_SPAN),
            attributes=attributes,
            start_time=round(began * 1e9),
        )
    finally:
        _chosen_ids.reset(token)
    if error:
        span.set_status(trace.Status(trace.StatusCode.ERROR, error))
    span.end(round(ended * 1e9))
