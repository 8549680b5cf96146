"""The page of all pools: what Prometheus' own parser reads of it, and that only what changed is written again."""

from __future__ import annotations

import random

from prometheus_client.parser import text_string_to_metric_families

from rollout_operator import pool_page
from rollout_operator.api.objects import PoolKey
from rollout_operator.pool_page import (
    CONDITION_STATUSES,
    FAILED_CALLS,
    FAILED_PASSES,
    FAILED_WRITES,
    UPDATE_BOUNDS,
    UPDATE_OUTCOMES,
    PoolMetrics,
    PoolPage,
)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(page: PoolPage) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(page.render_page().decode()):
        for sample in family.samples:
            at = (sample.name, frozenset(sample.labels.items()))
            assert at not in found, f"twice: {at}"
            found[at] = sample.value
    return found


def at(name: str, key: PoolKey, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset({"namespace": key.namespace, "pool": key.name, **labels}.items())


def test_the_page_says_what_was_set() -> None:
    """A random life of some pools, against a plain count."""
    rng, page = random.Random(5), PoolPage()
    wanted: dict[PoolKey, Samples] = {}
    keys = [PoolKey("ns", f"pool-{number}") for number in range(6)]
    for _ in range(60):
        key = rng.choice(keys)
        if rng.random() < 0.05:
            page.forget_pool(key)
            wanted.pop(key, None)
            continue
        mine = wanted.setdefault(key, new_pool(key))
        match rng.randrange(4):
            case 0:
                figures = random_figures(rng)
                page.set_figures(key, figures)
                mine = wanted[key] = {s: v for s, v in mine.items() if is_counted(s[0])}
                mine |= shown(key, figures)
            case 1:
                outcome, seconds = rng.choice(UPDATE_OUTCOMES), rng.choice([0.5, 1.0, 7.0, 9e4])
                page.observe_update(key, outcome, seconds)
                observe(mine, key, outcome, seconds)
            case 2:
                labels = {
                    "verb": rng.choice(["patch", "create"]),
                    "resource": "pods",
                    "reason": "x",
                }
                page.count_event(key, FAILED_WRITES, **labels)
                mine[at(FAILED_WRITES, key, **labels)] = (
                    mine.get(at(FAILED_WRITES, key, **labels), 0) + 1
                )
            case _:
                page.count_event(key, FAILED_CALLS, verb="stage")
                mine[at(FAILED_CALLS, key, verb="stage")] = (
                    mine.get(at(FAILED_CALLS, key, verb="stage"), 0) + 1
                )
        found = samples_of(page)
        assert found == {s: v for each in wanted.values() for s, v in each.items()}


def is_counted(name: str) -> bool:
    return "update" in name or "failed" in name


def new_pool(key: PoolKey) -> Samples:
    mine = {at(FAILED_PASSES, key): 0.0}
    for outcome in UPDATE_OUTCOMES:
        observe(mine, key, outcome, None)
    return mine


def observe(mine: Samples, key: PoolKey, outcome: str, seconds: float | None) -> None:
    name = "rollout_pool_weights_update_seconds"
    bounds = [*UPDATE_BOUNDS] if outcome == "Complete" else []
    for bound in (*bounds, float("inf")):
        edge = "+Inf" if bound == float("inf") else str(bound)
        spot = at(f"{name}_bucket", key, outcome=outcome, le=edge)
        mine[spot] = mine.get(spot, 0) + float(seconds is not None and seconds <= bound)
    for part, more in (("count", float(seconds is not None)), ("sum", seconds or 0.0)):
        spot = at(f"{name}_{part}", key, outcome=outcome)
        mine[spot] = mine.get(spot, 0) + more


def random_figures(rng: random.Random) -> PoolMetrics:
    return PoolMetrics(
        desired=rng.randrange(9),
        ready=rng.randrange(9),
        restarts=rng.randrange(9),
        weights={"target": (1, rng.randrange(99))} if rng.random() < 0.7 else {},
        conditions={"Ready": rng.choice(CONDITION_STATUSES)} if rng.random() < 0.7 else {},
        degraded=rng.choice([None, "BackOff", 'odd "reason"\\']),
    )


def shown(key: PoolKey, figures: PoolMetrics) -> Samples:
    found = {
        at(f"rollout_pool_{name}", key): float(value)
        for name, value in (
            ("replicas_desired", figures.desired),
            ("replicas", figures.replicas),
            ("replicas_ready", figures.ready),
            ("replicas_asleep", figures.asleep),
            ("replicas_unreachable", figures.unreachable),
            ("consecutive_failures", figures.in_a_row),
            ("restarts_total", figures.restarts),
        )
    }
    for which, (epoch, version) in figures.weights.items():
        found[at("rollout_pool_weights_epoch", key, which=which)] = epoch
        found[at("rollout_pool_weights_version", key, which=which)] = version
    for kind, status in figures.conditions.items():
        for each in CONDITION_STATUSES:
            found[at("rollout_pool_condition", key, type=kind, status=each)] = float(each == status)
    if figures.degraded is not None:
        found[at("rollout_pool_degraded", key, reason=figures.degraded)] = 1.0
    return found


def test_figures_that_stay_are_not_written_again() -> None:
    page, key = PoolPage(), PoolKey("ns", "pool")
    page.set_figures(key, PoolMetrics(ready=3))
    lines = page._pools[key].lines
    kept = {name: id(text) for name, text in lines.items()}
    page.set_figures(key, PoolMetrics(ready=3))
    assert {name: id(text) for name, text in lines.items()} == kept
    page.set_figures(key, PoolMetrics(ready=4))
    assert (
        f'{pool_page.UPDATE_TIMES}_count{{namespace="ns",outcome="Complete",pool="pool"}} 0.0'
        in (page.render_page().decode())
    )
