"""The control port of one worker: state, holds, weights.

    ControlError(status, slug, detail, extensions)   the worker refused or failed
    ControlUnreachable                               no answer: down, starting, cut off, too slow

All verbs are idempotent, so a caller without an answer asks again. Only the answer of `state` says
what became of a request.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from rollout_common import tracing, wire
from rollout_common.kube.httpx_connections import system_error

from .http_clients import bearer_header, origin_of
from .settings import DEADLINE_SLACK_SECONDS, QUICK_CALL_SECONDS, STATE_TIMEOUT_SECONDS

M = TypeVar("M", bound=BaseModel)
Token = Callable[[], Awaitable[str | None]]
Send = Callable[[str, str, Mapping[str, str], bytes | None, float], Awaitable[tuple[int, bytes]]]
"""Sends (method, URL, headers, body, seconds) and returns (status, body); OSError: no answer came."""

PROBLEM_PREFIX = "urn:rollout:problem:"

TLS_HINT = "a port that takes only TLS ends calls like this: name its CA by control_ca, or --control-ca-file"


class ControlError(Exception):
    """The worker refused or failed.

    Attributes:
        status: HTTP status.
        slug: Last part of the problem's type, such as `not-staged`; "" if the answer has none.
        detail: What happened and what to do, in the worker's words.
        extensions: Machine-readable facts about the problem.
    """

    def __init__(
        self, status: int, slug: str, detail: str, extensions: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(f"{status} {slug}: {detail}" if slug else f"{status}: {detail}")
        self.status = status
        self.slug = slug
        self.detail = detail
        self.extensions = dict(extensions or {})

    def __reduce__(self) -> tuple[type[ControlError], tuple[int, str, str, dict[str, Any]]]:
        """Pickle the fields, not only the text."""
        return type(self), (self.status, self.slug, self.detail, self.extensions)


class ControlUnreachable(Exception):
    """No answer came in time; the message says from where, and why.

    Attributes:
        slow: Whether time ran out, so that the worker may only be busy; otherwise nothing listens.
    """

    def __init__(self, message: str, *, slow: bool = False) -> None:
        super().__init__(message)
        self.slow = slow

    def __reduce__(self) -> tuple[type[ControlUnreachable], tuple[str], dict[str, bool]]:
        """Pickle the fields, not only the text."""
        return type(self), (str(self),), {"slow": self.slow}


class WorkerControl:
    """Client of one control port.

    Args:
        base_url: For example `http://10.0.0.7:8001`.
        token: Called before each request for the bearer token; None: send none.
        client: Shared connections, or what sends: over `HttpClients` to any number of workers.
    """

    def __init__(self, base_url: str, token: Token, client: httpx.AsyncClient | Send) -> None:
        self._base_url = base_url.rstrip("/")
        self._token = token
        if isinstance(client, httpx.AsyncClient):
            self._request = send_over_httpx(lambda _: nullcontext(client))
        else:
            self._request = client

    async def state(
        self, *, since: int | None = None, wait: float = 0.0, timeout: float = STATE_TIMEOUT_SECONDS
    ) -> wire.WorkerState:
        """Return the worker's state.

        Args:
            since: `seq` of the last one, with `wait`: the answer comes once the state is another one.
            wait: Seconds after which it comes in any case.
            timeout: Of the call, after the wait.
        """
        path = "/v1/state" if since is None else f"/v1/state?since={since}&wait={wait:g}"
        return await self._call_route(path, None, wire.WorkerState, timeout + wait)

    async def pause(
        self, request: wire.PauseRequest | None = None, *, timeout: float | None = None
    ) -> wire.WorkerState:
        """Hold generation."""
        request = request or wire.PauseRequest()
        limit = timeout or request.deadline_seconds + DEADLINE_SLACK_SECONDS
        return await self._call_route("/v1/pause", request, wire.WorkerState, limit)

    async def resume(self, request: wire.ReleaseRequest | None = None) -> wire.WorkerState:
        """Drop this caller's pause."""
        body = request or wire.ReleaseRequest()
        return await self._call_route("/v1/resume", body, wire.WorkerState, DEADLINE_SLACK_SECONDS)

    async def sleep(
        self, request: wire.SleepRequest | None = None, *, timeout: float | None = None
    ) -> wire.WorkerState:
        """Free the engine's memory."""
        request = request or wire.SleepRequest()
        limit = timeout or request.deadline_seconds + DEADLINE_SLACK_SECONDS
        return await self._call_route("/v1/sleep", request, wire.WorkerState, limit)

    async def wake(
        self,
        request: wire.WakeRequest | None = None,
        *,
        timeout: float = 5 * DEADLINE_SLACK_SECONDS,
    ) -> wire.WorkerState:
        """Allocate the memory again; after a sleep of level 2 load the model, unless `load` is false."""
        body = request or wire.WakeRequest()
        return await self._call_route("/v1/wake", body, wire.WorkerState, timeout)

    async def abort(self, request: wire.AbortRequest) -> wire.AbortResponse:
        """Abort some or all requests."""
        return await self._call_route("/v1/abort", request, wire.AbortResponse)

    async def stage(
        self, request: wire.StageRequest, *, timeout: float = QUICK_CALL_SECONDS
    ) -> wire.StagedWeights:
        """Start staging and return at once; progress is in `weights` and `state`."""
        return await self._call_route("/v1/weights/stage", request, wire.StagedWeights, timeout)

    async def commit(
        self, request: wire.CommitRequest, *, timeout: float | None = None
    ) -> wire.Committed:
        """Flip to the staged weights."""
        limit = timeout or request.deadline_seconds + DEADLINE_SLACK_SECONDS
        return await self._call_route("/v1/weights/commit", request, wire.Committed, limit)

    async def discard(self, request: wire.DiscardRequest) -> wire.DiscardResponse:
        """Drop the staged weights of this identity, if they are staged."""
        return await self._call_route("/v1/weights/discard", request, wire.DiscardResponse)

    async def dtypes(self) -> wire.WeightsDtypes:
        """Return the dtypes of the model's checkpoint, which every version has to have."""
        return await self._call_route("/v1/weights/dtypes", None, wire.WeightsDtypes)

    async def offer(self, request: wire.OfferRequest) -> wire.OfferResponse:
        """Return a ticket with which another worker fetches pushed weights from this one."""
        return await self._call_route("/v1/weights/offer", request, wire.OfferResponse)

    async def require(self, request: wire.RequireRequest) -> wire.WeightsState:
        """Raise the epoch; with `min_version`, lift the fence and set the lowest admitted version."""
        return await self._call_route("/v1/require", request, wire.WeightsState)

    async def reset_cache(self) -> wire.WorkerState:
        """Forget all cached prefixes."""
        return await self._call_route("/v1/cache/reset", wire.ResetRequest(), wire.WorkerState)

    async def _call_route(
        self,
        path: str,
        body: BaseModel | None,
        answer: type[M],
        timeout: float = QUICK_CALL_SECONDS,
    ) -> M:
        method = "GET" if body is None else "POST"
        status, content = await self._send_request(method, path, body, timeout)
        try:
            # A newer worker may send fields that this client does not know.
            return answer.model_validate_json(content, extra="ignore")
        except ValidationError as error:
            where = f"{method} {self._base_url}{path}"
            detail = f"{where}: the answer is not a {answer.__name__}: {error}"
            raise ControlError(status, "bad-answer", detail) from error

    async def _send_request(
        self, method: str, path: str, body: BaseModel | None, timeout: float
    ) -> tuple[int, bytes]:
        url = self._base_url + path
        headers = {"Accept": "application/json"}
        if (token := await self._token()) is not None:
            try:
                headers["Authorization"] = bearer_header(token)
            except ValueError as error:
                why = f"the token of the control ports can't be used: {error}"
                raise ControlUnreachable(why) from error
        tracing.add_trace_header(headers)
        content = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = body.model_dump_json(exclude_none=True).encode()
        try:
            status, answer = await self._request(method, url, headers, content, timeout)
        except OSError as error:
            reason = str(error) or type(error).__name__
            slow = isinstance(error, TimeoutError)
            raise ControlUnreachable(f"{method} {url}: {reason}", slow=slow) from error
        if status >= 300:
            raise parse_problem(status, answer)
        return status, answer


def send_over_httpx(
    client_for: Callable[[str], AbstractContextManager[httpx.AsyncClient]],
    tls_name: str | None = None,
) -> Send:
    """Return what sends over httpx.

    Args:
        client_for: Lends a client for a request to an origin, as `HttpClients.client_for` does.
        tls_name: What certificates must name; None: the URL's host.
    """
    extensions = None if tls_name is None else {"sni_hostname": tls_name}

    async def send(
        method: str, url: str, headers: Mapping[str, str], content: bytes | None, seconds: float
    ) -> tuple[int, bytes]:
        try:
            with client_for(origin_of(url)) as client:
                answer = await client.request(
                    method, url, content=content, headers=dict(headers), timeout=seconds,
                    extensions=extensions,
                )  # fmt: skip
        except httpx.TimeoutException as error:
            raise TimeoutError(str(error) or type(error).__name__) from error
        except httpx.RemoteProtocolError as error:
            hint = "" if url.startswith("https:") else f" ({TLS_HINT})"
            raise ConnectionError(f"{error}{hint}") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            reason = str(system_error(error) or error) or type(error).__name__
            raise ConnectionError(reason) from error
        return answer.status_code, answer.content

    return send


def parse_problem(status: int, content: bytes) -> ControlError:
    """Return the error for an unsuccessful answer, whether it is problem+json or not."""
    try:
        problem = json.loads(content)
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        return ControlError(status, "", content.decode(errors="replace")[:256] or "no message")
    slug = str(problem.pop("type", "")).removeprefix(PROBLEM_PREFIX)
    title = problem.pop("title", None)
    detail = str(problem.pop("detail", None) or title or "no detail")
    problem.pop("status", None)
    return ControlError(status, slug, detail, problem)
