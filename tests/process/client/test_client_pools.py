"""Both pools offer the same; the synchronous one in callbacks; errors and hooks of many pools."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import pickle
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import rollout_client
from rollout_client import (
    AsyncRolloutPool,
    Hook,
    ManyFailed,
    NoReplica,
    PoolClosed,
    PrometheusHook,
    RequestRefused,
    RolloutError,
    RolloutPool,
)
from rollout_client.errors import StateTaken
from rollout_client.generating.generate_options import OWN_OPTIONS, GenerateOptions
from rollout_client.integrations.ray import PoolActor
from rollout_client.pool.asynchronous import PoolOptions
from rollout_client.pool.synchronous import _iterate
from rollout_client.worker_control import ControlError, ControlUnreachable
from rollout_worker.schemas import GenerateRequest
from tests.support.waiting import until_sync

NOWHERE = ["http://127.0.0.1:9"]


def public(kind: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(kind) if not name.startswith("_")}


def parameters(method: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(method).parameters.values()
    return [(each.name, each.default, each.annotation) for each in found if each.name != "progress"]


def test_the_synchronous_pool_has_the_same_methods_with_the_same_arguments() -> None:
    ours, theirs = public(RolloutPool), public(AsyncRolloutPool)
    assert set(ours) == set(theirs) | {"epoch", "floor"}  # plain attributes of the other
    for name, method in theirs.items():
        if callable(method):
            assert parameters(ours[name]) == parameters(method), name


@pytest.mark.parametrize(
    ("make", "odd", "meant"),
    [
        ("from_urls", "control_url", "control_urls"),
        ("from_dns", "ttl_second", "ttl_seconds"),
        ("from_cluster", "max_failure", "max_failures"),
    ],
)
def test_a_pool_refuses_options_that_do_not_exist(make: str, odd: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"{make} has no argument '{odd}': .*'{meant}'"):
        getattr(RolloutPool, make)(NOWHERE if make == "from_urls" else "math", **{odd: 1})


def test_every_verb_refuses_options_that_do_not_exist() -> None:
    with RolloutPool.from_urls(NOWHERE) as pool:
        verbs: dict[str, Any] = {
            "generate": lambda **odd: pool.generate([1], **odd),
            "stream": lambda **odd: pool.stream([1], **odd).__enter__(),
            "generate_many": lambda **odd: pool.generate_many([[1]], **odd),
            "score": lambda **odd: pool.score([1], **odd),
            "as_completed": lambda **odd: list(pool.as_completed([[1]], **odd)),
            "publish_weights": lambda **odd: pool.publish_weights(1, "/w", **odd),
            "turn": lambda **odd: pool.turn(**odd).__enter__(),
        }
        for name, method in public(RolloutPool).items():
            kinds = (
                {p.kind for p in inspect.signature(method).parameters.values()}
                if callable(method)
                else ()
            )
            if inspect.Parameter.VAR_KEYWORD in kinds and not name.startswith("from_"):
                with pytest.raises(TypeError, match=r"has no argument 'odd_name'"):
                    verbs[name](odd_name=1)


def test_the_actor_has_what_crosses_processes() -> None:
    ours, theirs = public(PoolActor), public(AsyncRolloutPool)
    missing = {"stream", "as_completed", "generating", "save_and_publish", "turn"}
    missing.add("publish_handed_over")  # what was handed over is in the trainer's own process
    made = {"from_urls", "from_dns", "from_cluster"}
    have = {name for name, value in theirs.items() if inspect.isfunction(value)}
    assert set(ours) == have - missing - made
    for name in ours:
        assert parameters(ours[name]) == parameters(theirs[name]), name


def test_no_argument_of_any_kind_is_taken_unseen() -> None:
    """Every argument is named and typed: what a request has, and what a pool has."""
    fields = set(GenerateRequest.model_fields) - {"token_ids", "stream", "multimodal"}
    assert set(GenerateOptions.__annotations__) == fields | set(OWN_OPTIONS)
    made = set(inspect.signature(AsyncRolloutPool.__init__).parameters)
    assert set(PoolOptions.__annotations__) == made - {"self", "discovery", "steering", "name"}


@pytest.fixture
def pool() -> Iterator[RolloutPool]:
    with RolloutPool.from_urls(NOWHERE, deadline_seconds=0.2) as pool:
        yield pool


def test_a_callback_that_would_wait_for_itself_is_told_so(pool: RolloutPool) -> None:
    said: list[str] = []

    def progress(ended: int, of: int) -> None:
        assert list(pool.load().values()) == [0]
        assert [member.url for member in pool.members] == NOWHERE
        assert len(pool.serving()) <= 1
        with pytest.raises(RuntimeError, match="another thread") as error:
            pool.generate([1])
        said.append(str(error.value))

    results = pool.generate_many([[1], [2]], progress=progress, on_error="return")
    assert [type(each) for each in results] == [NoReplica] * 2
    assert len(said) == 2


def test_a_pool_that_is_sent_to_another_process_says_what_to_do(pool: RolloutPool) -> None:
    for one in (pool, pool.asynchronous):
        for send in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="make one in each process"):
                send(one)


def test_a_pool_of_another_event_loop_says_what_to_do() -> None:
    pool = AsyncRolloutPool.from_urls(NOWHERE, deadline_seconds=0.1)
    with pytest.raises(NoReplica):
        asyncio.run(pool.generate([1]))
    with pytest.raises(RuntimeError, match="belongs to another event loop"):
        asyncio.run(pool.generate([1]))


def test_an_iteration_that_is_left_ends_without_a_word(pool: RolloutPool) -> None:
    """When its last reference goes: after the pool's end, or where the pool's own thread collects garbage."""
    ended: list[str] = []

    async def numbers() -> AsyncGenerator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            ended.append("closed")

    def begin() -> Iterator[int]:
        iteration = _iterate(pool._portal, numbers())
        assert next(iteration) == 1
        return iteration

    cycle: list[Any] = [begin()]
    cycle.append(cycle)
    del cycle
    pool._portal.read(gc.collect)
    until_sync(lambda: ended == ["closed"], what="its end")
    left = begin()
    pool.close()
    del left


def test_a_closed_pool_takes_a_stream_of_tensors_to_its_end(tmp_path: Path) -> None:
    """The other ranks wait in it."""
    pool = RolloutPool.from_urls(NOWHERE)
    pool.close()
    pushed, saved, together = (iter([("w", None)] * 3) for _ in range(3))
    given: Any = pushed, saved, together
    with pytest.raises(PoolClosed):
        pool.publish_weights(1, tensors=given[0])
    with pytest.raises(PoolClosed):
        pool.save_and_publish(given[1], 1, tmp_path)
    assert [*pushed, *saved] == []
    with pytest.raises(PoolClosed):
        pool.publish_weights(1, tensors=given[2], ranks=object())  # type: ignore[arg-type]
    assert len([*together]) == 3, "ranks that publish together have not met yet"


def test_another_thread_may_call_while_one_waits(pool: RolloutPool) -> None:
    loads: list[dict[str, int]] = []
    other = threading.Thread(target=lambda: loads.append(pool.load()))
    other.start()
    with pytest.raises(NoReplica):
        pool.generate([1])
    other.join(10)
    assert len(loads) == 1


def test_pools_may_share_a_registry() -> None:
    registry = CollectorRegistry()
    hooks: list[Hook] = [PrometheusHook("math", registry), PrometheusHook("code", registry)]
    for hook in (*hooks, PrometheusHook("math", registry)):
        hook.members(2, 1)
        hook.request("ok", 0.1, None)

    def of(pool: str) -> float | None:
        labels = {"pool": pool, "outcome": "ok"}
        return registry.get_sample_value("rollout_client_requests_total", labels)

    assert (of("math"), of("code")) == (2, 1)
    PrometheusHook("math", CollectorRegistry())


def kinds(base: type[RolloutError]) -> Iterator[type[RolloutError]]:
    yield base
    for each in base.__subclasses__():
        yield from kinds(each)


@pytest.mark.parametrize(
    "error",
    [
        *(kind("it broke", replica="p-0") for kind in kinds(RolloutError) if kind.__init__ in (
            RolloutError.__init__, rollout_client.RequestError.__init__)),
        RequestRefused("too long", replica="p-0", status=413, slug="too-long"),
        rollout_client.ClusterError("no", status=403, reason="Forbidden"),
        StateTaken("taken", wanted="Asleep"),
        rollout_client.TurnFailed("no", waiting_for={"gpu-0": "trainer-1"}),
        ManyFailed([NoReplica("nobody", replica="p-1"), RequestRefused("x", status=422)]),
        ControlError(409, "held", "asleep", {"holders": ["x"]}),
        ControlUnreachable("GET /v1/state: no answer"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_errors_survive_the_way_between_processes(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
    kept, came = dict(vars(error)), dict(vars(again))
    texts = [[str(each) for each in found.pop("results", [])] for found in (kept, came)]
    assert kept == came
    assert texts[0] == texts[1]


def test_an_error_of_many_requests_is_not_made_of_its_text() -> None:
    """A DataLoader tries that first with the error of a worker, and raises a RuntimeError of the text otherwise."""
    text: Any = "Caught ManyFailed in DataLoader worker process 0."
    with pytest.raises(TypeError):
        ManyFailed(text)
