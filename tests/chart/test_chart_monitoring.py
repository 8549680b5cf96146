"""Alerts and dashboards: valid PromQL over metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from localkube.debian import unpack_prometheus
from rollout_operator.api.names import ConditionType
from rollout_operator.api.objects import PoolKey
from rollout_operator.operator_telemetry import OperatorTelemetry as OperatorTelemetry
from rollout_operator.pool_page import PoolMetrics
from rollout_worker.observe.worker_telemetry import WorkerTelemetry as WorkerTelemetry
from tests.support.charts import CHART, ROOT, case, every, one, rendered

RULES = CHART / "rules.yaml"
DASHBOARDS = sorted((CHART / "dashboards").glob("*.json"))
GRID_COLUMNS = 24
"""Of Grafana's grid."""
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
    operator.pools.set_figures(
        PoolKey("default", "demo"),
        PoolMetrics(weights={"committed": (0, 0)}, conditions={"Ready": "True"}),
    )
    for families in (
        text_string_to_metric_families(operator.render_page().decode()),
        WorkerTelemetry().registry.collect(),
    ):
        for family in families:
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


Series = dict[str, str]
Case = tuple[Series, int] | tuple[Series, int, dict[str, str]]
"""Series by their names, the minute that is looked at, and the labels of what fires if they are not the usual ones."""

POOL = {"namespace": "a", "pool": "p"}
OPERATOR = {"namespace": "ops", "job": "operator"}


def named(metric: str, values: str, **labels: str) -> Series:
    inner = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return {f"{metric}{{{inner}}}": values}


def of_pool(metric: str, values: str, **labels: str) -> Series:
    """A series of the pool a/p."""
    return named(f"rollout_pool_{metric}", values, **POOL, **labels)


def pool_of(desired: int, exist: int, ready: int | str, *, asleep: int = 0) -> Series:
    """Series of the pool a/p, for four hours."""
    counts = {"_desired": desired, "": exist, "_asleep": asleep}
    found = {
        k: v for w, n in counts.items() for k, v in of_pool(f"replicas{w}", f"{n}x250").items()
    }
    return found | of_pool("replicas_ready", ready if isinstance(ready, str) else f"{ready}x250")


def condition(kind: str, status: str = "True", values: str = "1x250") -> Series:
    return of_pool("condition", values, type=kind, status=status)


def degraded(reason: str) -> Series:
    return condition("Degraded") | of_pool("degraded", "1x250", reason=reason)


def progressing(reason: str, values: str = "1x250") -> Series:
    return condition("Progressing", values=values) | of_pool("progressing", values, reason=reason)


def weights(target: tuple[int, int], committed: tuple[int, int]) -> Series:
    return {
        name: f"{value}x250"
        for which, both in (("target", target), ("committed", committed))
        for metric, value in zip(("weights_epoch", "weights_version"), both, strict=True)
        for name in of_pool(metric, "", which=which)
    }


def failed_writes(values: str) -> Series:
    return of_pool("failed_writes_total", values, **WRITE)


def worker(metric: str, values: str, **labels: str) -> Series:
    return named(f"rollout_worker_{metric}", values, **POOL, pod="w", **labels)


def operator(metric: str, values: str, job: str = "operator", **labels: str) -> Series:
    return named(f"rollout_operator_{metric}", values, namespace="ops", job=job, **labels)


def crashes(load: int) -> Series:
    """What the pool a/p shows of a replica that fails each time it has loaded for so many seconds."""
    minutes, moments, now, count = 240, [], 0.0, 0
    while now < minutes * 60:
        now += load
        count += 1
        moments.append(now)
        now += 0 if count == 1 else min(300, 10 * 2 ** (count - 2))
    counts = [sum(moment <= minute * 60 for moment in moments) for minute in range(minutes)]
    values = " ".join(map(str, counts))
    return of_pool("consecutive_failures", values) | of_pool("restarts_total", values)


WRITE = {"verb": "create", "resource": "pods", "reason": "ApiError"}
WORKER = {**POOL, "pod": "w"}
NEW_LEADER = named("rollout_pool_degraded", "1x30", **POOL, reason="BackOff", pod="o1") | named(
    "rollout_pool_degraded", "_x30 1x220", **POOL, reason="BackOff", pod="o2"
)
LOST = pool_of(8, 8, "8x30 0x220") | progressing("Starting", "_x30 1x220")


def queue_waits(*counts: str) -> Series:
    bounds = ("0.1", "5.0", "10.0", "+Inf")
    return {
        name: values
        for le, values in zip(bounds, counts, strict=True)
        for name in operator("queue_wait_seconds_bucket", "", le=le)
    }


LABELS = {"RolloutPool": POOL, "RolloutWorker": WORKER, "RolloutOperator": OPERATOR}
"""Of what fires, by the beginning of the alert's name."""

FIRES: dict[str, dict[str, Case]] = {
    "RolloutPoolDegraded": {
        "degraded": (degraded("BackOff"), 10),
    },
    "RolloutPoolNotServing": {
        "waking for long": (pool_of(8, 8, 0) | progressing("Waking"), 15),
        "pods refused": (pool_of(8, 0, 0) | degraded("Rejected"), 15),
        "every replica lost": (LOST, 45),
    },
    "RolloutPoolReplicasMissing": {
        "one of eight missing": (pool_of(8, 7, 7) | degraded("Rejected"), 120),
        "one lost asleep": (pool_of(8, 8, 5, asleep=2) | progressing("Waking"), 120),
        "missing under two leaders": (pool_of(8, 7, 7) | NEW_LEADER, 75),
    },
    "RolloutPoolStartsSlowly": {
        "starts for three hours": (pool_of(8, 8, 7) | progressing("Starting"), 180),
    },
    "RolloutPoolNotScraped": {
        "workers not scraped": (pool_of(2, 2, 2), 20),
    },
    "RolloutPoolWeightsBehind": {
        "version behind": (weights((1, 8), (1, 7)), 20),
        "epoch behind": (weights((2, 0), (1, 7)), 20),
    },
    "RolloutPoolNoLiveCopy": {
        "no live copy": (degraded("NoLiveCopy"), 5),
    },
    "RolloutPoolWritesFail": {
        "writes begin to fail": (failed_writes("1 4 5 5 5 6 6 6 6 6 7x100"), 15, POOL | WRITE),
        "a write every 5 minutes": (
            failed_writes("1 " + " ".join(f"{n}x5" for n in range(1, 20))),
            100,
            POOL | WRITE,
        ),
    },
    "RolloutPoolPassesFail": {
        "passes fail": (of_pool("failed_passes_total", "0+1x130"), 30),
    },
    "RolloutPoolUnreachable": {
        "unreachable": (of_pool("replicas_unreachable", "0 0 1x130"), 10),
    },
    "RolloutPoolRestarting": {
        **{
            f"a crash each {load} s, at minute {at}": (crashes(load), at)
            for load, at in ((60, 60), (180, 60), (300, 60), (900, 60), (60, 230), (900, 230))
        },
        "a restart a minute": (of_pool("restarts_total", "0+1x60"), 30),
    },
    "RolloutWorkerFailed": {
        "failed": (
            worker("lifecycle_state", "1x60", state="Failed"),
            15,
            WORKER | {"state": "Failed"},
        ),
        "the engine dies at the end of each load": (
            worker(
                "lifecycle_state", "1 0 0 0 0 0 1 0 0 0 0 0 1 0 0 0 0 0 1 0 0x60", state="Failed"
            )
            | worker(
                "lifecycle_state", "0 1 1 1 1 1 0 1 1 1 1 1 0 1 1 1 1 1 0 1 1x60", state="Loading"
            ),
            20,
            WORKER | {"state": "Failed"},
        ),
    },
    "RolloutWorkerEngineRestarting": {
        "engine dies each minute": (worker("engine_restarts_total", "0+1x60"), 20),
    },
    "RolloutWorkerQueueing": {
        "queued and none runs": (
            worker("requests_queued", "3x60") | worker("requests_in_flight", "0x60"),
            10,
        ),
    },
    "RolloutOperatorNoLeader": {
        "no leader": (operator("leader", "0x130"), 5),
        "no leader of one release": (
            operator("leader", "0x130") | operator("leader", "1x130", job="another"),
            5,
        ),
        "no leader of one shard": (
            operator("leader", "1x130", pod="a")
            | operator("leader", "0x130", pod="b")
            | operator("shards", "2x130"),
            5,
        ),
        "one release is gone": (
            operator("leader", "1x30 stale") | operator("leader", "1x130", job="another"),
            40,
        ),
        "no operator at all": ({"up": "1x130"}, 5, {}),
    },
    "RolloutOperatorErrors": {
        "an error a minute": (operator("reconcile_total", "0+1x130", result="error"), 40),
    },
    "RolloutOperatorSlow": {
        "pools wait": (queue_waits("0x60", "0+1x60", "0+10x60", "0+10x60"), 30),
    },
    "RolloutOperatorApiErrors": {
        "too many requests": (
            operator("api_requests_total", "0+12x60", verb="get", code="429"),
            30,
        ),
    },
}

SILENT: dict[str, dict[str, Series]] = {
    "RolloutPoolDegraded": {
        "recovered": condition("Degraded", "False"),
    },
    "RolloutPoolNotServing": {
        "asleep": pool_of(2, 2, 0, asleep=2) | condition("Asleep"),
        "paused": pool_of(2, 2, 0) | condition("Ready", "False"),
        "suspended": pool_of(2, 0, 0) | condition("Suspended"),
        "waits for its trainer": pool_of(2, 0, 0) | progressing("WaitingForTrainer"),
        "has no trainer": pool_of(2, 0, 0) | degraded("TooFewTrainers"),
        "loads, or queues for devices": pool_of(8, 8, 0) | progressing("Starting"),
        "loads after a suspension": LOST | condition("Suspended", values="0x30 1x10 0x210"),
    },
    "RolloutPoolReplicasMissing": {
        "paused as a whole": pool_of(2, 2, 0) | condition("Ready", "False"),
        "updating": pool_of(2, 2, 2) | progressing("StagingWeights"),
        "one waits for its trainer": pool_of(2, 1, 1) | progressing("WaitingForTrainer"),
        "one loads": pool_of(2, 2, 1) | progressing("Starting"),
    },
    "RolloutPoolStartsSlowly": {
        "loads for 90 minutes": progressing("Starting", "1x90 stale"),
        "trainer comes tomorrow": progressing("WaitingForTrainer"),
    },
    "RolloutPoolNotScraped": {
        "scraped": pool_of(2, 2, 2) | worker("info", "1x250"),
        "labels are not honored": named(
            "rollout_pool_replicas_ready",
            "2x250",
            namespace="ops",
            exported_namespace="a",
            pool="p",
        ),
        "none serves": pool_of(2, 2, 0),
    },
    "RolloutPoolWeightsBehind": {
        "ahead of the target": weights((1, 9), (2, 7)),
    },
    "RolloutPoolNoLiveCopy": {
        "degraded otherwise": degraded("BackOff"),
    },
    "RolloutPoolWritesFail": {
        "a busy minute": failed_writes("1 2 3 4x250"),
    },
    "RolloutPoolPassesFail": {
        "few failed passes": of_pool("failed_passes_total", "1 3 4x250"),
    },
    "RolloutPoolUnreachable": {
        "short silences": of_pool("replicas_unreachable", "0 1 0 1 0x250"),
    },
    "RolloutPoolRestarting": {
        "two failures": of_pool("consecutive_failures", "0 1 2x60 0x200"),
        "a restart": of_pool("restarts_total", "0x100 1x150"),
    },
    "RolloutWorkerFailed": {
        "ready": worker("lifecycle_state", "0x250", state="Failed"),
        "one crash, and a load of nine minutes": worker(
            "lifecycle_state", "0x9 1 0x240", state="Failed"
        )
        | worker("lifecycle_state", "0x10 1x8 0x230", state="Loading")
        | worker("lifecycle_state", "1x9 0x9 1x230", state="Active"),
    },
    "RolloutWorkerEngineRestarting": {
        "an engine died": worker("engine_restarts_total", "0x10 1x240"),
    },
    "RolloutWorkerQueueing": {
        "queued behind others": worker("requests_queued", "3x250")
        | worker("requests_in_flight", "8x250"),
    },
    "RolloutOperatorNoLeader": {
        "a standby": operator("leader", "0x250", pod="a") | operator("leader", "1x250", pod="b"),
    },
    "RolloutOperatorErrors": {
        "few errors": operator("reconcile_total", "1 3 4x250", result="error"),
    },
    "RolloutOperatorSlow": {
        "pools don't wait": queue_waits("0+10x250", "0+10x250", "0+10x250", "0+10x250"),
    },
    "RolloutOperatorApiErrors": {
        "a conflict now and then": operator(
            "api_requests_total", "0+12x250", verb="patch", code="409"
        ),
    },
}


def alert_test(name: str, alert: str, series: Series, minute: int, *fires: object) -> object:
    """A test as promtool takes it."""
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": k, "values": v} for k, v in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": list(fires)}
        ],
    }


def test_alerts_fire_and_keep_silent(tmp_path: Path) -> None:
    """All cases in one run of promtool, which names those that fail."""
    rules = yaml.safe_load(RULES.read_text())
    severity = {}
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule["annotations"] = {}  # who fires and with which labels is of interest, not the texts
        severity[rule["alert"]] = rule["labels"]["severity"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    tests = []
    for alert, cases_of in FIRES.items():
        usual = next(labels for begins, labels in LABELS.items() if alert.startswith(begins))
        for name, (series, minute, *labels) in cases_of.items():
            fires = {**(labels[0] if labels else usual), "severity": severity[alert]}
            tests.append(alert_test(name, alert, series, minute, {"exp_labels": fires}))
        # Later than any case of the alert fires, as far as most of these series go on.
        minute = min(130, max(case[1] for case in cases_of.values()) + 10)
        tests += [alert_test(name, alert, each, minute) for name, each in SILENT[alert].items()]
    cases = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(cases))
    promtool("test", "rules", tmp_path / "test.yaml")


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    assert FIRES.keys() == SILENT.keys() == alerts
    assert all((*FIRES.values(), *SILENT.values()))


def rules_of(*settings: str) -> dict[str, dict[str, Any]]:
    """Return the rules of the rendered PrometheusRule by their names."""
    wanted = ("enabled=true", *settings)
    spec = one(
        rendered(*(f"--set=metrics.prometheusRule.{each}" for each in wanted)), "PrometheusRule"
    )["spec"]
    return {rule["alert"]: rule for group in spec["groups"] for rule in group["rules"] or ()}


def test_single_alerts_can_be_changed() -> None:
    before = rules_of()
    after = rules_of(
        "alerts.RolloutPoolDegraded.enabled=false",
        "alerts.RolloutPoolNotServing.for=1h30m",
        "alerts.RolloutPoolNotServing.severity=page",
        "alerts.RolloutPoolRestarting.for=5m",
    )
    changed = {name for name, rule in after.items() if rule != before[name]}
    assert changed == {"RolloutPoolNotServing", "RolloutPoolRestarting"}
    assert set(before) - set(after) == {"RolloutPoolDegraded"}
    assert after["RolloutPoolNotServing"]["for"] == "1h30m"
    assert after["RolloutPoolNotServing"]["labels"] == {"severity": "page"}
    assert after["RolloutPoolRestarting"]["for"] == "5m"
    assert not rules_of(*(f"alerts.{name}.enabled=false" for name in before))


def test_chart_carries_rules_and_dashboards() -> None:
    documents = case("monitoring")
    rule = one(documents, "PrometheusRule")
    shipped = yaml.safe_load(RULES.read_text())
    for each in (each for group in shipped["groups"] for each in group["rules"]):
        # Alertmanager's readers are not in the repository: no link is better than a relative one.
        del each["annotations"]["runbook_url"]
    assert rule["spec"] == shipped
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    boards = one(documents, "ConfigMap", "rollout-rollout-operator-dashboards")
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    for path in DASHBOARDS:
        assert json.loads(boards["data"][path.name]) == json.loads(path.read_text())


def test_a_scrape_may_take_as_long_as_the_values_say() -> None:
    settings = "metrics.podMonitor.enabled=true,metrics.podMonitor.scrapeTimeout=5s"
    for monitor in every(rendered(f"--set={settings}"), "PodMonitor"):
        assert monitor["spec"]["podMetricsEndpoints"][0]["scrapeTimeout"] == "5s"


def test_the_trainer_of_the_hybrid_example_is_scraped_both_ways() -> None:
    documents = yaml.safe_load_all((ROOT / "examples" / "hybrid" / "trainer.yaml").read_text())
    pod = one(list(documents), "StatefulSet")["spec"]["template"]
    (monitor,) = (
        m for m in every(case("monitoring"), "PodMonitor") if "workers" in m["metadata"]["name"]
    )
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ports = {p["name"]: p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]}
    annotations = pod["metadata"]["annotations"]
    assert str(ports[monitor["spec"]["podMetricsEndpoints"][0]["port"]]) == "8000"
    assert annotations["prometheus.io/port"] == "8000"
    assert annotations["prometheus.io/scrape"] == "true"


def test_panels_name_the_pool_and_survive_a_new_leader() -> None:
    """Two pools of one name are two lines, and a series of another pod is the same line."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                assert " by (" in target["expr"], f"{panel['title']}: keeps `pod`"
                if path.stem == "rollout-pools":
                    assert target["legendFormat"].startswith("{{namespace}}/{{pool}}")
                else:
                    assert "{{job}}" in target["legendFormat"]


def all_panels() -> Iterator[dict[str, Any]]:
    for path in DASHBOARDS:
        yield from json.loads(path.read_text())["panels"]


def test_a_condition_has_the_color_of_what_it_means() -> None:
    """Grafana's own colors show 1 in red, whichever condition it is of."""
    (panel,) = (each for each in all_panels() if each["type"] == "state-timeline")
    found = {}
    for kind in ConditionType:
        mappings = panel["fieldConfig"]["defaults"]["mappings"]
        for override in panel["fieldConfig"]["overrides"]:
            assert override["matcher"]["id"] == "byRegexp"
            if re.search(override["matcher"]["options"].strip("/"), f"rl/math {kind}"):
                ((_, mappings),) = (each.values() for each in override["properties"])
        (mapping,) = mappings
        colors = {each["text"]: each["color"] for each in mapping["options"].values()}
        found[str(kind)] = (colors["True"], colors["False"])
    idle = found["Asleep"][1]
    assert found == {
        **dict.fromkeys(("Ready", "WeightsSynced"), ("green", "orange")),
        "Degraded": ("red", idle),
        **dict.fromkeys(("Progressing", "Asleep", "Suspended"), ("blue", idle)),
    }


def test_panels_count_in_whole_numbers_and_say_what_is_per_second() -> None:
    for panel in all_panels():
        looks = panel["fieldConfig"]["defaults"]
        if panel["type"] == "state-timeline":
            continue
        if any("rate(" in target["expr"] for target in panel["targets"]):
            says = "per second" in panel["title"] or looks["unit"] in ("s", "ops", "reqps")
            assert says or looks["unit"] == "percentunit", panel["title"]
        elif looks["unit"] == "short":
            assert looks["decimals"] == 0, panel["title"]


def test_a_number_of_pools_is_not_an_alarm() -> None:
    """Grafana shows numbers from 80 in red unless a panel says something else."""
    for panel in all_panels():
        if panel["type"] == "stat":
            looks = panel["fieldConfig"]["defaults"]
            assert "thresholds" in looks or looks["color"]["mode"] == "fixed", panel["title"]


def test_what_happens_rarely_is_a_mean_over_minutes() -> None:
    """A quantile over one interval of scrapes is a dash of the bucket's width, seen by nobody."""
    rare = re.compile(r"(weights_update|engine_pause|transition|turn_wait)_seconds")
    panels = [p for p in all_panels() if any(rare.search(t["expr"]) for t in p["targets"])]
    assert len(panels) == 7
    for panel in panels:
        assert not any("$__rate_interval" in target["expr"] for target in panel["targets"])


def test_dashboards_have_no_panel_twice_or_overlapping() -> None:
    assert [path.stem for path in DASHBOARDS] == ["rollout-operator", "rollout-pools"]
    for path in DASHBOARDS:
        panels = json.loads(path.read_text())["panels"]
        for key in ("id", "title"):
            assert len({panel[key] for panel in panels}) == len(panels)
        assert all(panel["description"] for panel in panels)
        cells = Counter(cell for panel in panels for cell in covered(panel["gridPos"]))
        assert set(cells.values()) == {1}, "overlapping"
        assert all(x < GRID_COLUMNS for x, _ in cells)


def covered(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    """Yield the cells of Grafana's grid that a panel covers."""
    for x in range(place["x"], place["x"] + place["w"]):
        for y in range(place["y"], place["y"] + place["h"]):
            yield x, y


def test_panels_ask_the_chosen_data_source_for_what_was_chosen() -> None:
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        variables = {each["name"] for each in dashboard["templating"]["list"]} - {"datasource"}
        for panel in dashboard["panels"]:
            targets = panel["targets"]
            assert len({target["refId"] for target in targets}) == len(targets) > 0
            for each in (panel, *targets):
                assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            for target in targets:
                for name in variables:
                    # One selector of the variable for each metric of the query.
                    chosen = target["expr"].count(f'{name}=~"${name}"')
                    assert chosen == len(METRIC.findall(target["expr"])), panel["title"]
