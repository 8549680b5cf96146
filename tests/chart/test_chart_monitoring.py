"""Alerts and dashboards: valid PromQL over metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from charts import CHART, case, every, one
from localkube.debian import unpack_prometheus
from rollout_operator.api.objects import Key
from rollout_operator.telemetry import PoolFigures
from rollout_operator.telemetry import Telemetry as OperatorTelemetry
from rollout_worker.observe.telemetry import Telemetry as WorkerTelemetry

RULES = CHART / "rules.yaml"
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
METRIC = re.compile(r"\brollout_[a-z_]+\b")


def promtool(*arguments: str | Path) -> None:
    program = unpack_prometheus() / "promtool"
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def metrics() -> set[str]:
    """Return the names of all series that operator and worker offer."""
    names = set()
    operator = OperatorTelemetry()
    operator.pool(
        Key("default", "demo"),
        PoolFigures(weights={"committed": (0, 0)}, conditions={"Ready": "True"}),
    )
    for registry in (operator.registry, WorkerTelemetry().registry):
        for family in registry.collect():
            if family.type == "histogram":
                names |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
            else:
                names.add(family.name + ("_total" if family.type == "counter" else ""))
    return names


def expressions() -> Iterator[tuple[str, str]]:
    """Yield where each PromQL expression stands, and the expression."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]


def test_every_metric_exists() -> None:
    known = metrics()
    for where, expression in expressions():
        used = set(METRIC.findall(expression))
        assert used, where
        assert used <= known, f"{where}: {sorted(used - known)}"


def test_dashboards_show_every_metric_of_ours() -> None:
    used = {name for _, e in expressions() for name in METRIC.findall(e)}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    unseen = {re.sub(r"_(bucket|sum|count)$", "", name) for name in metrics()} - families
    assert {name for name in unseen if name.startswith("rollout_")} <= {
        "rollout_worker_info",
        "rollout_worker_weights_version",
        "rollout_worker_weights_epoch",
    }


def test_rules_are_valid() -> None:
    promtool("check", "rules", RULES)


def test_every_query_of_the_dashboards_is_valid(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:number{i}", "expr": re.sub(r"\$__rate_interval", "5m", expression)}
        for i, (_, expression) in enumerate(expressions())
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", file)


def pool_of(desired: int, exist: int, ready: int, *, asleep: int = 0) -> dict[str, str]:
    """Series of the pool a/p, for two hours."""
    counts = {"_desired": desired, "": exist, "_ready": ready, "_asleep": asleep}
    return {
        f'rollout_pool_replicas{which}{{namespace="a",pool="p"}}': f"{count}x130"
        for which, count in counts.items()
    }


def condition(kind: str, status: str = "True") -> dict[str, str]:
    """A condition of the pool a/p, for two hours."""
    labels = f'namespace="a",pool="p",type="{kind}",status="{status}"'
    return {f"rollout_pool_condition{{{labels}}}": "1x130"}


def failed_writes(values: str) -> dict[str, str]:
    """A write of the pool a/p that fails, as often as the values say."""
    labels = 'namespace="a",pool="p",verb="create",resource="pods",reason="ApiError"'
    return {f"rollout_pool_failed_writes_total{{{labels}}}": values}


def in_a_row(values: str) -> dict[str, str]:
    """Failures in a row of the worst replica of the pool a/p."""
    return {'rollout_pool_consecutive_failures{namespace="a",pool="p"}': values}


def crashes(load: int, minutes: int = 240) -> dict[str, str]:
    """What the pool a/p shows of a replica that fails each time it has loaded for so many seconds."""
    moments, now, count = [], 0.0, 0
    while now < minutes * 60:
        now += load
        count += 1
        moments.append(now)
        now += 0 if count == 1 else min(300, 10 * 2 ** (count - 2))
    counts = [sum(moment <= minute * 60 for moment in moments) for minute in range(minutes)]
    restarts = 'rollout_pool_restarts_total{namespace="a",pool="p"}'
    return in_a_row(" ".join(map(str, counts))) | {restarts: " ".join(map(str, counts))}


POOL = {"namespace": "a", "pool": "p"}
LOADS = (60, 180, 300, 900)
"""Seconds that a replica loads before it fails."""

UNREACHABLE = 'rollout_pool_replicas_unreachable{namespace="a",pool="p"}'
WRITES_FAIL = (
    "RolloutPoolWritesFail",
    {"namespace": "a", "pool": "p", "verb": "create", "resource": "pods", "reason": "ApiError"},
)
FAILED_PASSES = {'rollout_pool_failed_passes_total{namespace="a",pool="p"}': "0+1x130"}


@pytest.mark.parametrize(
    ("series", "minutes", "alert", "labels"),
    [
        (
            {
                'rollout_pool_condition{namespace="a",pool="p",type="Degraded",status="True"}': "1x130"
            },
            10,
            "RolloutPoolDegraded",
            {"namespace": "a", "pool": "p", "type": "Degraded", "status": "True"},
        ),
        (
            pool_of(8, 8, 0) | condition("Progressing"),
            15,
            "RolloutPoolNotServing",
            {"namespace": "a", "pool": "p"},
        ),
        (
            pool_of(8, 0, 0) | condition("Degraded"),
            15,
            "RolloutPoolNotServing",
            {"namespace": "a", "pool": "p"},
        ),
        (
            pool_of(8, 7, 7) | condition("Degraded"),
            120,
            "RolloutPoolReplicasMissing",
            {"namespace": "a", "pool": "p"},
        ),
        (
            pool_of(8, 8, 5, asleep=2) | condition("Progressing"),
            120,
            "RolloutPoolReplicasMissing",
            {"namespace": "a", "pool": "p"},
        ),
        (
            {
                'rollout_pool_weights_epoch{namespace="a",pool="p",which="target"}': "1x130",
                'rollout_pool_weights_epoch{namespace="a",pool="p",which="committed"}': "1x130",
                'rollout_pool_weights_version{namespace="a",pool="p",which="target"}': "8x130",
                'rollout_pool_weights_version{namespace="a",pool="p",which="committed"}': "7x130",
            },
            20,
            "RolloutPoolWeightsBehind",
            {"namespace": "a", "pool": "p"},
        ),
        (
            {
                'rollout_pool_weights_epoch{namespace="a",pool="p",which="target"}': "2x130",
                'rollout_pool_weights_epoch{namespace="a",pool="p",which="committed"}': "1x130",
                'rollout_pool_weights_version{namespace="a",pool="p",which="target"}': "0x130",
                'rollout_pool_weights_version{namespace="a",pool="p",which="committed"}': "7x130",
            },
            20,
            "RolloutPoolWeightsBehind",
            {"namespace": "a", "pool": "p"},
        ),
        (
            {'rollout_pool_degraded{namespace="a",pool="p",reason="NoLiveCopy"}': "1x130"},
            5,
            "RolloutPoolNoLiveCopy",
            {"namespace": "a", "pool": "p", "reason": "NoLiveCopy"},
        ),
        ({"rollout_operator_leader": "0x130"}, 5, "RolloutOperatorNoLeader", {}),
        (failed_writes("1 4 5 5 5 6 6 6 6 6 7x100"), 15, *WRITES_FAIL),
        (failed_writes("1 " + " ".join(f"{n}x5" for n in range(1, 20))), 100, *WRITES_FAIL),
        (FAILED_PASSES, 30, "RolloutPoolPassesFail", {"namespace": "a", "pool": "p"}),
        ({UNREACHABLE: "0 0 1x130"}, 10, "RolloutPoolUnreachable", POOL),
        *((crashes(load), at, "RolloutPoolRestarting", POOL) for load in LOADS for at in (60, 230)),
        (
            {'rollout_pool_restarts_total{namespace="a",pool="p"}': "0+1x130"},
            60,
            "RolloutPoolRestarting",
            POOL,
        ),
        (
            {'rollout_operator_reconcile_total{result="error"}': "0+1x130"},
            40,
            "RolloutOperatorErrors",
            {},
        ),
    ],
    ids=[
        *("degraded", "not serving", "pods refused", "one of eight missing", "one lost asleep"),
        *("version behind", "epoch behind", "no live copy", "no leader"),
        *("writes begin to fail", "a write every 5 minutes", "passes fail", "unreachable"),
        *(f"a crash each {load} s, at minute {at}" for load in LOADS for at in (60, 230)),
        *("many replicas fail once", "an error a minute"),
    ],
)
def test_alert_fires(
    series: dict[str, str], minutes: int, alert: str, labels: dict[str, str], tmp_path: Path
) -> None:
    firing(series, minutes, alert, labels, tmp_path)


@pytest.mark.parametrize(
    ("series", "alert"),
    [
        (pool_of(2, 2, 0, asleep=2) | condition("Asleep"), "RolloutPoolNotServing"),
        (pool_of(2, 2, 0) | condition("Ready", "False"), "RolloutPoolNotServing"),
        (pool_of(2, 0, 0) | condition("Suspended"), "RolloutPoolNotServing"),
        (pool_of(2, 2, 0) | condition("Ready", "False"), "RolloutPoolReplicasMissing"),
        (pool_of(2, 2, 2) | condition("Progressing"), "RolloutPoolReplicasMissing"),
        (
            {
                'rollout_pool_weights_epoch{namespace="a",pool="p",which="target"}': "1x130",
                'rollout_pool_weights_epoch{namespace="a",pool="p",which="committed"}': "2x130",
                'rollout_pool_weights_version{namespace="a",pool="p",which="target"}': "9x130",
                'rollout_pool_weights_version{namespace="a",pool="p",which="committed"}': "7x130",
            },
            "RolloutPoolWeightsBehind",
        ),
        (
            {
                'rollout_operator_leader{pod="a"}': "0x130",
                'rollout_operator_leader{pod="b"}': "1x130",
            },
            "RolloutOperatorNoLeader",
        ),
        (failed_writes("1 2 3 4x130"), "RolloutPoolWritesFail"),
        (
            {'rollout_pool_failed_passes_total{namespace="a",pool="p"}': "1 3 4x130"},
            "RolloutPoolPassesFail",
        ),
        ({UNREACHABLE: "0 1 0 1 0x130"}, "RolloutPoolUnreachable"),
        (in_a_row("0 1 2x60 0x130"), "RolloutPoolRestarting"),
        (
            {'rollout_operator_reconcile_total{result="error"}': "1 3 4x130"},
            "RolloutOperatorErrors",
        ),
    ],
    ids=[
        *("asleep", "paused", "suspended", "paused as a whole", "updating"),
        *("ahead of the target", "a standby", "a busy minute", "few failed passes"),
        *("short silences", "two failures", "few errors"),
    ],
)
def test_alert_does_not_fire(series: dict[str, str], alert: str, tmp_path: Path) -> None:
    firing(series, 120, alert, None, tmp_path)


def firing(
    series: dict[str, str],
    minutes: int,
    alert: str,
    labels: dict[str, str] | None,
    folder: Path,
) -> None:
    """Let promtool check that an alert fires with these labels (None: does not fire)."""
    severity = {
        rule["alert"]: rule["labels"]["severity"]
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
    }[alert]
    # Only who fires and with which labels is of interest, not the texts.
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule["annotations"] = {}
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    expected = [] if labels is None else [{"exp_labels": {**labels, "severity": severity}}]
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": k, "values": f"{v}"} for k, v in series.items()],
                "alert_rule_test": [
                    {"eval_time": f"{minutes}m", "alertname": alert, "exp_alerts": expected}
                ],
            }
        ],
    }
    (folder / "test.yaml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", folder / "test.yaml")


def test_chart_carries_rules_and_dashboards() -> None:
    documents = case("monitoring")
    rule = one(documents, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    boards = one(documents, "ConfigMap", "rollout-rollout-operator-dashboards")
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    for path in DASHBOARDS:
        assert json.loads(boards["data"][path.name]) == json.loads(path.read_text())


def test_monitors_scrape_ports_that_exist() -> None:
    documents = case("monitoring")
    ports = {
        endpoint["port"]: monitor["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]
        for monitor in every(documents, "PodMonitor")
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
    }
    # `data` is the port of the pods that operator/core/pods/ builds.
    assert ports == {"http": "rollout-operator", "data": "rollout-worker"}


def test_dashboards_have_no_panel_twice_or_overlapping() -> None:
    for path in DASHBOARDS:
        panels = json.loads(path.read_text())["panels"]
        places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}
        assert len(places) == len(panels) == len({p["title"] for p in panels})
        assert all(p["description"] for p in panels)
