"""Rollouts without a pause while their pool is rolled, updated, put to sleep and scaled.

That a worker is killed and the pool grows below requests is in `test_training`, which checks each token, too.
The client runs under the account of a trainer, as it would in a trainer's pod. All sampling is greedy, so that
an answer's first tokens tell which weights made them, whatever its label says.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, takewhile
from typing import Any

import pytest

from localkube import Cluster
from rollout_client import GenerateResult, RolloutError, RolloutPool
from tests.support.cluster.pools import PROMPT, START_SECONDS, Pool
from tests.support.cluster.versions import Volume
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(540)
"""Minutes on a busy machine: four workers start, two of them one after the other."""

NAMESPACE, ACCOUNT, NAME = "trainers", "life-trainer", "survivor"
IN_FLIGHT = 8
TOKENS = 300
"""Enough that a request takes a second or more: who is hit while it runs is cut short."""

TOLD = 16
"""First tokens of an answer by which weights are recognised."""

PROMPTS = [[*PROMPT, 400 + i] for i in range(4)]
CALM_SECONDS = 1.0
"""Between two prompts while workers start: they need the processors more than the prompts do."""

PATIENCE_SECONDS = 150.0
"""Of one request: nobody serves while the pool sleeps and while its only worker is replaced."""

Identity = tuple[int, int]


class Rollouts:
    """A trainer's thread: prompt after prompt, `IN_FLIGHT` at a time, until the block ends.

    `calm`: fewer, for as long as nothing happens to a worker that answers.
    """

    def __init__(self, pool: RolloutPool) -> None:
        self.results: list[tuple[int, GenerateResult | RolloutError]] = []
        """The prompt's index and its answer, as they ended."""
        self.asked = 0
        self._pool = pool
        self._end = threading.Event()
        self._pressing = threading.Event()
        self._pressing.set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Roll out during the block; afterwards every prompt has ended."""
        self._thread.start()
        try:
            yield
        finally:
            self._end.set()
            self._pressing.set()
            self._thread.join(PATIENCE_SECONDS + 30)
        assert not self._thread.is_alive(), "a prompt was never answered"

    @contextmanager
    def calm(self) -> Iterator[None]:
        """Send a prompt every `CALM_SECONDS` during the block; what runs goes on."""
        self._pressing.clear()
        try:
            yield
        finally:
            self._pressing.set()

    def go_on(self) -> None:
        """Wait until the requests now under way, and as many again, were answered."""
        wanted = len(self.results) + 2 * IN_FLIGHT
        eventually("rollouts go on", lambda: len(self.results) >= wanted, PATIENCE_SECONDS)

    def busy(self, members: int) -> None:
        """Wait until so many members have requests of ours."""

        def all_have() -> bool:
            load = self._pool.load()
            return len(load) == members and all(load.values())

        eventually(f"{members} members are busy", all_have, 60, every=0.01)

    def answers(self) -> list[tuple[int, GenerateResult]]:
        """All results; a prompt that failed raises its error."""
        for _, result in self.results:
            if isinstance(result, RolloutError):
                raise result
        return [(i, r) for i, r in self.results if isinstance(r, GenerateResult)]

    def _prompts(self) -> Iterator[list[int]]:
        for index in takewhile(lambda _: not self._end.is_set(), count()):
            self.asked += 1
            yield PROMPTS[index % len(PROMPTS)]

    def _run(self) -> None:
        for ended in self._pool.as_completed(
            self._prompts(),
            concurrency=IN_FLIGHT,
            sampling=sampling(TOKENS),
            deadline_seconds=PATIENCE_SECONDS,
        ):
            self.results.append(ended)
            self._pressing.wait(CALM_SECONDS)  # the next prompt is sent once this one is taken


def sampling(tokens: int) -> dict[str, Any]:
    """Greedy, and never shorter."""
    return {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def volume() -> Iterator[Volume]:
    made = Volume(NAME)
    made.clean()
    yield made
    made.clean()


@pytest.fixture
def life(pool: Callable[..., Pool]) -> Pool:
    """A pool whose updates abort what runs."""
    return pool(
        NAME,
        NAMESPACE,
        replicas=2,
        weights={"volume": {"claim": {"name": "weights"}}, "inFlight": {"policy": "Abort"}},
    )


@pytest.fixture
def trainer(cluster: Cluster, life: Pool) -> Iterator[RolloutPool]:
    """The pool's client, with the rights of the chart's trainer."""
    grant = [f"--serviceaccount={NAMESPACE}:{ACCOUNT}", "--clusterrole=rollout-trainer"]
    for words in (["serviceaccount", ACCOUNT], ["rolebinding", ACCOUNT, *grant]):
        life.kubectl("create", *words, check=False)  # there from a run before
    kubeconfig = cluster.service_account_kubeconfig(NAMESPACE, ACCOUNT)
    with RolloutPool.from_cluster(NAME, NAMESPACE, kubeconfig=kubeconfig) as client:
        client.wait_serving(2, seconds=START_SECONDS)
        yield client


def test_every_prompt_is_answered_through_a_pools_life(
    life: Pool, trainer: RolloutPool, volume: Volume
) -> None:
    life.wait("Ready")
    answers = {(0, 0): first_tokens(trainer)}
    rollouts = Rollouts(trainer)
    with rollouts.running():
        rollouts.busy(2)
        roll(life, rollouts)
        rollouts.busy(2)
        done = trainer.publish_weights(1, volume.publish("1"))
        published = rollouts.asked
        rollouts.busy(2)
        trainer.sleep()
        assert life.status()["phase"] == "Asleep"
        trainer.wake()
        rollouts.busy(2)
        scale(life, 1)
        rollouts.go_on()
    new = done.identity.as_tuple()
    answers[new] = first_tokens(trainer)
    check_answers(rollouts, answers)
    for index, result in rollouts.answers():
        assert index < published or identities(result) == [new], "old weights after an update"
    check_members(trainer, life)


def roll(life: Pool, rollouts: Rollouts) -> None:
    """Change the template, and wait until only pods of the new one serve; one did all the time."""
    least = 2

    def whole() -> bool:
        nonlocal least
        least = min(least, len(life.endpoints()))
        labels = [pod["metadata"]["labels"].get("team") for pod in life.pods()]
        return labels == ["blue"] * 2 and life.condition("Ready")[0] == "True"

    life.patch(podTemplate={"labels": {"team": "blue"}})
    with rollouts.calm():
        life.eventually("both pods are of the new template", whole, 2 * START_SECONDS, every=0.2)
    assert least == 1, "one at a time"


def scale(life: Pool, replicas: int) -> None:
    """Scale as `kubectl scale` does, and wait until so many pods are left."""
    life.kubectl("scale", "rr", NAME, f"--replicas={replicas}")
    life.wait("Ready")
    life.eventually(f"{replicas} pods", lambda: len(life.pods()) == replicas, 60)


def first_tokens(pool: RolloutPool) -> list[tuple[int, ...]]:
    """What the weights of this moment answer to each prompt."""
    return [r.token_ids for r in pool.generate_many(PROMPTS, sampling=sampling(TOLD))]


def identities(result: GenerateResult) -> list[Identity]:
    """Identities of an answer's spans, in order."""
    return [(span.epoch, span.version) for span in result.output.weights]


def check_answers(rollouts: Rollouts, answers: dict[Identity, list[tuple[int, ...]]]) -> None:
    """Every prompt has one whole answer, by the weights that it names, and some were cut short."""
    results = rollouts.answers()
    assert sorted(index for index, _ in results) == list(range(rollouts.asked)), "each once"
    for index, result in results:
        check(result, answers, index % len(PROMPTS))
    assert {i for _, r in results for i in identities(r)} == answers.keys()
    outcomes = Counter(a.outcome for _, r in results for a in r.attempts if a.tokens)
    assert outcomes["aborted"] + outcomes["broken"], f"nothing was cut short: {outcomes}"


def check(result: GenerateResult, answers: dict[Identity, list[tuple[int, ...]]], of: int) -> None:
    """The answer is whole, its identities only rise, and its tokens are of those weights."""
    output, spans = result.output, result.output.weights
    assert (output.stop_reason, len(output.token_ids)) == ("length", TOKENS)
    assert len(output.logprobs or ()) == TOKENS
    assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])]
    assert spans[-1].end == TOKENS
    assert sum(attempt.tokens for attempt in result.attempts) == TOKENS
    seen = identities(result)
    assert seen == sorted(set(seen)), "weights came back"
    assert set(seen) <= answers.keys()
    known = min(spans[0].end, TOLD)
    assert output.token_ids[:known] == answers[seen[0]][of][:known], f"not of {seen[0]}"


def check_members(pool: RolloutPool, life: Pool) -> None:
    """Only those who live are members, and nothing runs there."""
    living = {(p["metadata"]["name"], p["status"]["podIP"]) for p in life.pods()}
    wanted = {(name, f"http://{address}:8000") for name, address in living}
    assert len(wanted) == 1
    eventually(
        "only the living are members",
        lambda: {(m.name, m.url) for m in pool.members} == wanted,
        20,
    )
    assert pool.load() == {name: 0 for name, _ in wanted}
    assert len(pool.serving()) == 1
