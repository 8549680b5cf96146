"""One request to one worker: `POST /v1/generate` as a stream, event by event.

It always streams, so that no token is lost if the worker dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import lru_cache

import httpx
from pydantic import ValidationError

from rollout_client.http_clients import describe_error
from rollout_client.routing.router import AttemptLease
from rollout_client.worker_control import parse_problem
from rollout_common import tracing
from rollout_common.wire import (
    GenerateRequest,
    PromptLogprobs,
    RoutedExperts,
    StreamDelta,
    StreamDone,
    WeightsId,
)
from rollout_common.wire.event_frames import FRAMES_TYPE, STREAM_COMMENT, FrameReader

from .output_draft import BadDelta

StreamFrame = StreamDelta | PromptLogprobs | RoutedExperts
"""What a stream brings before its end."""
_FRAME_KINDS: dict[str, type[StreamFrame]] = {
    "delta": StreamDelta, "prompt_logprobs": PromptLogprobs, "routed_experts": RoutedExperts,
}  # fmt: skip
TakeFrame = Callable[[StreamFrame], None]

MAX_PROBLEM_BYTES = 65536
MAX_EVENT_BYTES = 64 * 2**20
_HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}


class AttemptBroken(Exception):
    """The attempt ended before the worker ended it: cut off, silent, or with unusable data."""


@dataclass(eq=False)
class AttemptRefused(Exception):
    """The worker answered with a problem instead of a stream."""

    status: int
    slug: str
    detail: str
    retry_after: float | None = None
    active: WeightsId | None = None

    def __str__(self) -> str:
        return f"{self.status} {self.slug}: {self.detail}" if self.slug else self.detail


async def run_attempt(
    client: httpx.AsyncClient,
    lease: AttemptLease,
    request: GenerateRequest,
    take: TakeFrame,
    seconds: float,
    taken: Callable[[], None] = lambda: None,
) -> StreamDone:
    """Send a request with `stream`, and call `take` with each delta, and each part of a prompt's scores and routes.

    `taken` is called once the worker has accepted the request. The lease notes when the worker was last heard; `HealthChecker` cuts the attempt off through it.

    Raises:
        AttemptRefused: The worker answered with a problem.
        AttemptBroken: The stream had no end; the deltas so far are valid.
    """
    try:
        async with asyncio.timeout(seconds) as scope:
            lease.watch_timeout(scope)
            about = {"url.full": str(_generate_url(lease.member.url))}
            with tracing.open_span("attempt", "client", attributes=about):
                return await _exchange_stream(client, lease, request, take, taken)
    except TimeoutError:
        # Either the deadline passed, or the lease was cut off.
        raise AttemptBroken(lease.cut or f"no end within {seconds:.1f} s") from None
    except httpx.HTTPError as error:
        raise AttemptBroken(describe_error(error)) from error
    except (BadDelta, ValidationError, ValueError) as error:
        raise AttemptBroken(f"it sent data that can't be used: {str(error)[:300]}") from error
    finally:
        lease.watch_timeout(None)


async def _exchange_stream(
    client: httpx.AsyncClient,
    lease: AttemptLease,
    request: GenerateRequest,
    take: TakeFrame,
    taken: Callable[[], None],
) -> StreamDone:
    body = request.model_dump_json(exclude_none=True, exclude_defaults=True)
    done: StreamDone | None = None
    url = _generate_url(lease.member.url)
    recorded = request.return_routed_experts or request.return_sampling_mask
    headers = {**_HEADERS, "Accept": FRAMES_TYPE} if recorded else dict(_HEADERS)
    tracing.add_trace_header(headers)
    async with client.stream("POST", url, content=body, headers=headers) as answer:
        if answer.status_code != 200:
            raise await _read_refusal(answer)
        taken()
        # Read to the end even after `done`: only then can the connection be used again.
        try:
            read = (
                _read_frames if answer.headers.get("Content-Type") == FRAMES_TYPE else _read_events
            )
            async for name, data in read(answer, lease):
                done = done or _handle_event(name, data, take)
        except httpx.HTTPError:
            if done is None:
                raise
    if done is None:
        raise AttemptBroken("the connection ended in the middle of the stream")
    return done


@lru_cache(maxsize=4096)
def _generate_url(url: str) -> httpx.URL:
    """Return a member's route; httpx would parse a relative URL twice per request."""
    return httpx.URL(f"{url}/v1/generate")


def _handle_event(name: str, data: bytes, take: TakeFrame) -> StreamDone | None:
    """Pass a delta on, or return the end; fields of newer workers are ignored."""
    if kind := _FRAME_KINDS.get(name):
        take(kind.model_validate_json(data, extra="ignore"))
    elif name == "done":
        return StreamDone.model_validate_json(data, extra="ignore")
    elif name == "error":
        raise AttemptBroken(f"the stream broke: {parse_problem(200, data).detail}")
    return None


async def _read_events(
    answer: httpx.Response, lease: AttemptLease
) -> AsyncIterator[tuple[str, bytes]]:
    """Yield (name, data) of server-sent events; a comment becomes an empty `message`."""
    pending = b""
    async for chunk in answer.aiter_bytes():
        if chunk != STREAM_COMMENT:  # an engine that hangs is silent, too
            lease.note_heard()
        *whole, pending = (pending + chunk).split(b"\n\n")
        if len(pending) > MAX_EVENT_BYTES:
            raise ValueError("an event does not end")
        for block in whole:
            name, data = "message", b""
            for line in block.split(b"\n"):
                if line.startswith(b"data:"):
                    data += line[5:].strip()
                elif line.startswith(b"event:"):
                    name = line[6:].strip().decode()
            yield name, data


async def _read_frames(
    answer: httpx.Response, lease: AttemptLease
) -> AsyncIterator[tuple[str, bytes]]:
    """Yield (name, data) of the events of a stream of binary frames."""
    reader = FrameReader()
    async for chunk in answer.aiter_bytes():
        lease.note_heard()
        for frame in reader.push_bytes(chunk):
            yield frame


async def _read_refusal(answer: httpx.Response) -> AttemptRefused:
    problem = parse_problem(answer.status_code, (await answer.aread())[:MAX_PROBLEM_BYTES])
    retry_after = _parse_retry_after(answer.headers.get("Retry-After"))
    active = _parse_identity(problem.extensions.get("active"))
    return AttemptRefused(problem.status, problem.slug, problem.detail, retry_after, active)


def _parse_retry_after(text: str | None) -> float | None:
    """Return Retry-After in seconds; workers never send it as a date."""
    try:
        return None if text is None else min(60.0, max(0.0, float(text)))
    except ValueError:
        return None


def _parse_identity(value: object) -> WeightsId | None:
    try:
        return None if value is None else WeightsId.model_validate(value, extra="ignore")
    except ValidationError:
        return None
