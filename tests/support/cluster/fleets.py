"""The pool that the tests of weights share: versions, answers, traffic, trouble; one fixture, one file.

A worker costs ten seconds of a core, so one pool lives through many tests: each raises the
version. `Fleet` knows which bytes an identity was published with, and checks that an answer's
tokens are those that these bytes make, not only its label.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from localkube import Cluster, ClusterError
from tests.support.api.apiclient import POOLS, ApiError, Obj
from tests.support.cluster.pools import PROMPT, START_SECONDS, Pool
from tests.support.cluster.versions import Identity, Reply, Traffic, Volume, steering_token

GATE = "rollout.dev/serving"
WEIGHTS = {"volume": {"claim": {"name": "weights"}}}
TUNABLES = {"strategy", "maxUnavailable", "inFlight", "deadlineSeconds"}
NOT_PLAIN = dict.fromkeys(("state", "suspend", "sleep"))
DRAIN_SECONDS = 5


class Fleet(Pool):
    """A pool whose versions rise from test to test."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        super().__init__(cluster, namespace, name)
        # The address of a dead pod answers nothing at all. Requests that hold a commit run while other workers start.
        patience = httpx.Timeout(2 * START_SECONDS, connect=2)
        self._http = httpx.Client(trust_env=False, timeout=patience)
        self._threads = ThreadPoolExecutor(16)
        self._token = ""
        self.volume = Volume(name)
        self.identity: Identity = (0, 0)
        self.bytes_of: dict[Identity, str] = {(0, 0): "checkpoint"}
        self._tokens: dict[str, list[int]] = {}

    def create(self, replicas: int, **spec: Any) -> None:
        """Create the pool with a pointer from the start; returns at once."""
        self.volume.clean()
        path = self.publish("1", epoch=1)
        epoch, version = self.identity
        target = {"epoch": epoch, "version": version, "source": {"path": path}}
        restarts = {"baseDelaySeconds": 1}
        weights = {**WEIGHTS, "target": target}
        self.apply(replicas=replicas, restartPolicy=restarts, weights=weights, **spec)

    def steady(self, replicas: int) -> None:
        """Bring the pool back to serving with default settings, however it was left."""
        for replica in range(replicas):
            with suppress(AssertionError, ClusterError, httpx.HTTPError, KeyError):
                self.go_on(replica)
                self.let_go(replica)
        spec = self.get()["spec"]
        weights = {**WEIGHTS, **dict.fromkeys(TUNABLES)}
        plain = not TUNABLES & spec["weights"].keys() and not NOT_PLAIN.keys() & spec.keys()
        if not plain or spec["replicas"] != replicas or spec["drainSeconds"] != DRAIN_SECONDS:
            self.patch(**NOT_PLAIN, replicas=replicas, drainSeconds=DRAIN_SECONDS, weights=weights)
        if not self.serves(self.identity, seconds=5 if plain else 15):
            self.raise_to("1", epoch=self.identity[0] + 1)
        self.settled(self.identity, replicas, seconds=90)

    def serves(self, identity: Identity, seconds: float) -> bool:
        """Whether the pool comes to serve this identity within so many seconds."""
        try:
            self.eventually(f"the pool serves {identity}", lambda: self._at(identity), seconds)
        except AssertionError:
            return False
        return True

    def close(self) -> None:
        """Delete the pool and what it published."""
        self.delete()
        self.volume.clean()
        self._threads.shutdown()
        self._http.close()

    def update(self) -> dict[str, Any]:
        found: dict[str, Any] = self.status().get("weights", {}).get("lastUpdate") or {}
        return found

    def now(self) -> str:
        """This moment, for `history` and `phases`: minutes later the API server has forgotten it."""
        return self.api.version(POOLS.format(self.namespace))

    def history(self, since: str) -> list[Obj]:
        """Every status that was written since that moment, oldest first."""
        states = self.api.changes(POOLS.format(self.namespace), self.name, since)
        return [state.get("status") or {} for state in states]

    def phases(self, since: str | None = None) -> list[tuple[Identity, str]]:
        """Phases of updates, as written since that moment, or the present one."""
        return phases_of([self.status()] if since is None else self.history(since))

    # Moving weights.

    def publish(self, seed: str, *, epoch: int | None = None, late: bool = False) -> str:
        """Choose the next identity, bound to these bytes; `late`: they are not there yet."""
        if epoch is None:
            self.identity = (self.identity[0], self.identity[1] + 1)
        else:
            self.identity = (epoch, 1)
        self.bytes_of[self.identity] = seed
        return self.volume.reserve() if late else self.volume.publish(seed)

    def point(self, path: str, **weights: Any) -> Identity:
        """Move the pointer to the newest identity at this path."""
        self.target(*self.identity, path, **weights)
        return self.identity

    def raise_to(self, seed: str, *, epoch: int | None = None, **weights: Any) -> Identity:
        """Publish bytes under the next identity and move the pointer there."""
        return self.point(self.publish(seed, epoch=epoch), **weights)

    def wait_phase(self, phase: str, identity: Identity, seconds: float = 30.0) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            status = self.status()
            found = status.get("weights", {}).get("lastUpdate") or {}
            seen = (found.get("epoch"), found.get("version"), found.get("phase"))
            return status if seen == (*identity, phase) else None

        status = self.eventually(f"{identity} is {phase}", look, seconds, every=0.02)
        assert status is not None
        return status

    def settled(self, identity: Identity, replicas: int, seconds: float = 60.0) -> None:
        """Wait until all replicas serve this identity, and ask each of them."""

        if not self.serves(identity, seconds):
            raise AssertionError(f"{identity} is not served after {seconds:g} s: {self.status()}")
        for replica in range(replicas):
            self.check(self.generate(replica), identity)

    def _at(self, identity: Identity) -> bool:
        pool = self.get()
        status = pool.get("status") or {}
        current = {
            c["type"]: c["status"]
            for c in status.get("conditions", ())
            if c.get("observedGeneration") == pool["metadata"]["generation"]
        }
        committed = status.get("weights", {}).get("committed") or {}
        return (
            current.get("Ready") == "True"
            and current.get("WeightsSynced") == "True"
            and (committed.get("epoch"), committed.get("version")) == identity
        )

    def check(self, answer: dict[str, Any], identity: Identity | None = None) -> Identity:
        """An answer to the prompt is labelled with one identity and made of its bytes."""
        labels = self.identities(answer)
        assert len(labels) == 1, labels
        assert identity in (None, labels[0]), labels
        seed = self.bytes_of[labels[0]]
        tokens = answer["outputs"][0]["token_ids"][:8]
        assert self._tokens.setdefault(seed, tokens) == tokens, f"not the bytes of {labels[0]}"
        others = [t for s, t in self._tokens.items() if s != seed]
        assert tokens not in others, "two versions answer the same: the test shows nothing"
        return labels[0]

    # Asking the workers.

    def weights(self, replica: int) -> dict[str, Any]:
        """What the worker says of its weights, without asking the operator."""
        answer: dict[str, Any] = self._http.get(f"{self.url(replica)}/v1/weights").json()
        return answer

    def loaded(self, replica: int) -> bool:
        """Whether the worker listens and has a model."""
        try:
            return self.weights(replica)["active"] is not None
        except (httpx.TransportError, KeyError):
            return False

    def staged_seen(self) -> int:
        """How many replicas have staged, as the operator knows."""
        seen: int = self.status()["weights"]["stagedReplicas"]
        return seen

    def active(self, replica: int) -> Identity:
        """What the worker serves with."""
        found = self.weights(replica)["active"]
        return found["epoch"], found["version"]

    def staged(self, replica: int) -> Identity | None:
        """What the worker could commit now."""
        slot = self.weights(replica)["staged"]
        if slot is None or slot["phase"] != "Staged":
            return None
        return slot["epoch"], slot["version"]

    def ask(self, replica: int | None = None, tokens: int = 8, **body: Any) -> Reply:
        """As `generate`, but refusals are answers, too."""
        return self._post(f"{self.url(replica)}/v1/generate", tokens, **body)

    def _post(self, url: str, tokens: int, **body: Any) -> Reply:
        sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
        answer = self._http.post(url, json={"token_ids": PROMPT, "sampling": sampling, **body})
        return Reply(answer.status_code, answer.json(), time.monotonic())

    def long_request(self, replica: int | None, tokens: int) -> Future[Reply]:
        """Start a request of about 3 ms a token; returns once a worker runs it."""
        replicas = range(self.get()["spec"]["replicas"]) if replica is None else (replica,)
        before = self.in_flight(*replicas)
        reply = self._threads.submit(self.ask, replica, tokens)
        self.eventually(
            "the request runs", lambda: self.in_flight(*replicas) > before, 10, every=0.01
        )
        return reply

    def in_flight(self, *replicas: int) -> float:
        return sum(self.metric("rollout_worker_requests_in_flight", each) for each in replicas)

    @contextmanager
    def traffic(self, *replicas: int) -> Iterator[Traffic]:
        """Ask these replicas (none: the Service) for short answers until the block ends."""
        seen, stop = Traffic(), threading.Event()
        urls = [f"{self.url(r)}/v1/generate" for r in replicas or (None,)]

        def drive(url: str) -> None:
            while not stop.is_set():
                try:
                    seen.replies.append(self._post(url, 8))
                except httpx.HTTPError as error:
                    seen.failures.append(f"{type(error).__name__}: {error}")
                stop.wait(0.02)

        drivers = [self._threads.submit(drive, url) for url in urls]
        try:
            yield seen
        finally:
            stop.set()
            for driver in drivers:
                driver.result(timeout=90)

    def gates(self) -> dict[str, tuple[str, str, str]]:
        """Readiness gates by pod: status, time of the last change, message with the boot id."""
        found = {}
        for pod in self.pods():
            for condition in pod["status"].get("conditions", ()):
                if condition["type"] == GATE:
                    found[pod["metadata"]["name"]] = (
                        condition["status"],
                        condition["lastTransitionTime"],
                        condition.get("message", ""),
                    )
        return found

    def gate(self, replica: int) -> str:
        """Whether the operator lets the Service send requests to a replica: `True`, `False`."""
        return self.gates().get(f"{self.name}-{replica}-0", ("None", "", ""))[0]

    # A trainer that goes around the operator.

    def control(self, replica: int, verb: str, body: dict[str, Any] | None = None) -> Reply:
        """Call a worker's control port as the trainer; no body: GET."""
        return self._control(replica, verb, body, lambda event, _: None)

    def control_soon(self, replica: int, verb: str, body: dict[str, Any]) -> Future[Reply]:
        """As `control`, and returns once the call is sent, so that later ones come after it."""
        sent = threading.Event()

        def trace(event: str, _: object) -> None:
            if event == "http11.send_request_body.complete":
                sent.set()

        reply = self._threads.submit(self._control, replica, verb, body, trace)
        assert sent.wait(10), f"the call of {verb} was not sent"
        return reply

    def _control(
        self,
        replica: int,
        verb: str,
        body: dict[str, Any] | None,
        trace: Callable[[str, object], None],
    ) -> Reply:
        if not self._token:
            self._token = steering_token(self)
        url = f"http://{self.pod(replica)['status']['podIP']}:8001/v1/{verb}"
        headers = {"Authorization": f"Bearer {self._token}"}
        method = "GET" if body is None else "POST"
        answer = self._http.request(
            method, url, headers=headers, json=body, extensions={"trace": trace}
        )
        return Reply(answer.status_code, answer.json(), time.monotonic())

    def let_go(self, replica: int) -> None:
        """Drop whatever hold the trainer has."""
        if self._token:
            self.control(replica, "wake", {})
            self.control(replica, "resume", {})

    # Trouble.

    def first_answer(self, replica: int, seconds: float = 120.0) -> Identity:
        """Ask a replica that starts until it answers; every refusal before that is a 503."""

        def look() -> Identity | None:
            try:
                reply = self.ask(replica)
            except (httpx.HTTPError, ApiError, KeyError):
                return None  # no pod, no address, no listener
            assert reply.status in (200, 503), reply.body
            return self.check(reply.body) if reply.status == 200 else None

        found = self.eventually(f"replica {replica} answers", look, seconds)
        assert found is not None
        return found

    def stop(self, replica: int) -> None:
        """SIGSTOP the worker."""
        os.kill(self.pid(replica), signal.SIGSTOP)

    def go_on(self, replica: int) -> None:
        """SIGCONT the worker."""
        os.kill(self.pid(replica), signal.SIGCONT)

    def pause_operator(self, paused: bool) -> None:
        self.annotate(reconcile_paused="true" if paused else None)


def phases_of(history: list[dict[str, Any]]) -> list[tuple[Identity, str]]:
    """Phases of updates in the order in which these statuses were written."""
    seen: list[tuple[Identity, str]] = []
    for status in history:
        update = status.get("weights", {}).get("lastUpdate")
        if update:
            entry = ((update["epoch"], update["version"]), update["phase"])
            if not seen or seen[-1] != entry:
                seen.append(entry)
    return seen
