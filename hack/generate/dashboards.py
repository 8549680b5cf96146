"""Makes the chart's Grafana dashboards, pools and operator; one file, as panels are mostly text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Doc = dict[str, Any]

WIDTH, HEIGHT, COLUMNS = 8, 8, 3
POOL = 'namespace=~"$namespace",pool=~"$pool"'
JOB = 'job=~"$job"'
BY_POOL = "namespace, pool"
LEGEND = "{{namespace}}/{{pool}}"


@dataclass(frozen=True)
class Panel:
    """One graph: `queries` are (expression, legend)."""

    title: str
    meaning: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


def legend_of(by: str) -> str:
    """Return the legend for labels, pools as namespace/name."""
    return " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",")).replace(
        "{{namespace}} {{pool}}", LEGEND
    )


def quantiles(metric: str, by: str = BY_POOL, selector: str = POOL) -> tuple[tuple[str, str], ...]:
    """Return median and p99 of a histogram; without observations there is no line, not NaN."""
    rate = f"sum by (le, {by}) (rate({metric}_bucket{{{selector}}}[$__rate_interval]))"
    return tuple(
        (f"histogram_quantile({q}, {rate}) >= 0", f"{legend_of(by)} p{q * 100:g}")
        for q in (0.5, 0.99)
    )


def summed(metric: str, by: str = BY_POOL, selector: str = POOL) -> tuple[str, str]:
    """Return the rate of a counter, summed."""
    return f"sum by ({by}) (rate({metric}{{{selector}}}[$__rate_interval]))", legend_of(by)


def hourly(metric: str, by: str = BY_POOL) -> tuple[str, str]:
    """Return by how much a counter of pools grew in an hour."""
    return f"sum by ({by}) (increase({metric}{{{POOL}}}[1h]))", legend_of(by)


def gauge(metric: str, by: str = BY_POOL, also: str = "") -> tuple[str, str]:
    """Return a gauge of the chosen pools' workers, summed."""
    return f"sum by ({by}) ({metric}{{{POOL}}})", f"{legend_of(by)} {also}".strip()


def figure(name: str, also: str = "", selector: str = "") -> tuple[str, str]:
    """Return a figure that the operator shows of each pool; `pod` is left out, as leaders change."""
    return (
        f"max by ({BY_POOL}) (rollout_pool_{name}{{{POOL}{selector}}})",
        f"{LEGEND} {also}".strip(),
    )


def identity(part: str, which: str) -> tuple[str, str]:
    """Return the epoch or version of a pool's target, committed or active weights."""
    return figure(f"weights_{part}", which, f',which="{which}"')


def _difference(part: str, operator: str) -> str:
    return f"{identity(part, 'target')[0]} {operator} {identity(part, 'active_min')[0]}"


POOLS = (
    Panel(
        "Replicas",
        "Replicas that are desired, that exist, that serve, that are asleep and that do not answer.",
        "short",
        (
            figure("replicas_desired", "desired"),
            figure("replicas", "total"),
            figure("replicas_ready", "serving"),
            figure("replicas_asleep", "asleep"),
            figure("replicas_unreachable", "unreachable"),
        ),
    ),
    Panel(
        "Conditions",
        "1 while a condition is True; Degraded should never be.",
        "short",
        (
            (
                f'max by ({BY_POOL}, type) (rollout_pool_condition{{{POOL},status="True"}})',
                f"{LEGEND} {{{{type}}}}",
            ),
        ),
        "state-timeline",
    ),
    Panel(
        "Weights version",
        "Target and committed version; they differ while an update is in progress.",
        "short",
        (identity("version", "target"), identity("version", "committed")),
    ),
    Panel(
        "Weights epoch",
        "Increases when another trainer takes over.",
        "short",
        (identity("epoch", "target"), identity("epoch", "committed")),
    ),
    Panel(
        "Versions behind the target",
        "Of the replica with the oldest weights, within one epoch: how stale new tokens are.",
        "short",
        ((f"{_difference('version', '-')} and {_difference('epoch', '==')}", LEGEND),),
    ),
    Panel(
        "Weights updates",
        "Mean time from the start of an update to its outcome, over the whole pool, of those in the last 10 minutes.",
        "s",
        (
            (
                f"sum by ({BY_POOL}, outcome) (increase(rollout_pool_weights_update_seconds_sum{{{POOL}}}[10m]))"
                f" / (sum by ({BY_POOL}, outcome) (increase(rollout_pool_weights_update_seconds_count{{{POOL}}}[10m])) > 0)",
                f"{LEGEND} {{{{outcome}}}}",
            ),
        ),
    ),
    Panel(
        "Updates by outcome",
        "In the last hour.",
        "short",
        (hourly("rollout_pool_weights_update_seconds_count", f"{BY_POOL}, outcome"),),
    ),
    Panel(
        "Replica restarts",
        "In the last hour, and the most failures in a row of one replica.",
        "short",
        (
            hourly("rollout_pool_restarts_total"),
            figure("consecutive_failures", "in a row"),
        ),
    ),
    Panel(
        "Failed control calls",
        "Calls of the operator to control ports that were refused or not answered, per second.",
        "short",
        (summed("rollout_pool_failed_calls_total", f"{BY_POOL}, verb"),),
    ),
    Panel(
        "Engine restarts",
        "Engine restarts inside their workers, in the last hour.",
        "short",
        (hourly("rollout_worker_engine_restarts_total"),),
    ),
    Panel(
        "Generated tokens",
        "Per second.",
        "short",
        (summed("rollout_worker_generated_tokens_total"),),
    ),
    Panel(
        "Prompt tokens",
        "Tokens of accepted prompts, per second.",
        "short",
        (summed("rollout_worker_prompt_tokens_total"),),
    ),
    Panel(
        "Finished outputs",
        "Per second, by stop reason.",
        "reqps",
        (summed("rollout_worker_requests_total", f"{BY_POOL}, stop_reason"),),
    ),
    Panel(
        "Refused requests",
        "Requests per second answered with 409, 429 or 503, by reason; clients retry these. Others are wrong.",
        "reqps",
        (summed("rollout_worker_refused_total", f"{BY_POOL}, reason"),),
    ),
    Panel(
        "Requests",
        "Running and queued.",
        "short",
        (
            gauge("rollout_worker_requests_in_flight", also="running"),
            gauge("rollout_worker_requests_queued", also="queued"),
        ),
    ),
    Panel(
        "Workers without a request",
        "Share of the workers whose engine has nothing to do, asleep ones included.",
        "percentunit",
        (
            (
                f"avg by ({BY_POOL}) (rollout_worker_requests_in_flight{{{POOL}}} == bool 0)",
                LEGEND,
            ),
        ),
    ),
    Panel(
        "Request duration",
        "From acceptance to completion.",
        "s",
        quantiles("rollout_worker_request_duration_seconds"),
    ),
    Panel(
        "Time to first token",
        "From acceptance to the first token, the time in the queue included.",
        "s",
        quantiles("rollout_worker_time_to_first_token_seconds"),
    ),
    Panel(
        "Time between tokens",
        "Of one output; the mean where several tokens arrive together.",
        "s",
        quantiles("rollout_worker_inter_token_seconds"),
    ),
    Panel(
        "Weights update of a worker",
        "Duration of each phase.",
        "s",
        quantiles("rollout_worker_weights_update_seconds", f"{BY_POOL}, phase"),
    ),
    Panel(
        "Engine pause during commit",
        "Time during which an engine could generate no tokens.",
        "s",
        quantiles("rollout_worker_engine_pause_seconds"),
    ),
    Panel(
        "Time paused by commits",
        "Share of the engines' time in the last 10 minutes.",
        "percentunit",
        (
            (
                f"avg by ({BY_POOL}) (rate(rollout_worker_engine_pause_seconds_sum{{{POOL}}}[10m]))",
                LEGEND,
            ),
        ),
    ),
    Panel(
        "Lifecycle transitions",
        "Duration of sleep, wake, pause and other transitions.",
        "s",
        quantiles("rollout_worker_transition_seconds", f"{BY_POOL}, transition"),
    ),
    Panel(
        "Wait for the turn",
        "Time until a worker that shares its devices may use them.",
        "s",
        quantiles("rollout_worker_turn_wait_seconds"),
    ),
    Panel(
        "Memory that others keep",
        "Of a device that takes turns: what other processes had of it when the engine was last to take memory.",
        "bytes",
        (gauge("rollout_worker_turn_residue_bytes", f"{BY_POOL}, pod, instance, device"),),
    ),
    Panel(
        "Workers by state",
        "How many replicas' workers are in each lifecycle state.",
        "short",
        (gauge("rollout_worker_lifecycle_state", f"{BY_POOL}, state"),),
    ),
    Panel(
        "Resident memory",
        "Host memory of the workers, not GPU memory. It grows during vLLM's level-1 sleep: the weights move there.",
        "bytes",
        (gauge("rollout_worker_memory_resident_bytes", f"{BY_POOL}, pod, instance"),),
    ),
)

OPERATOR = (
    Panel(
        "Leaders",
        "Should be 1 of each release.",
        "short",
        ((f"sum by (namespace, job) (rollout_operator_leader{{{JOB}}})", "{{namespace}} {{job}}"),),
        "stat",
    ),
    Panel(
        "Pools",
        "Pools known to the leader.",
        "short",
        ((f"count by (job) (rollout_pool_replicas{{{JOB}}})", "{{job}}"),),
        "stat",
    ),
    Panel(
        "Time since last watch event",
        "By resource; a quiet cluster has long gaps.",
        "s",
        (
            (
                "time() - max by (job, resource) "
                f"(rollout_operator_watch_last_event_timestamp_seconds{{{JOB}}})",
                "{{job}} {{resource}}",
            ),
        ),
    ),
    Panel(
        "Reconcile passes",
        "Per second, by result.",
        "ops",
        (summed("rollout_operator_reconcile_total", "job, result", JOB),),
    ),
    Panel(
        "Pass duration",
        "From the start of a pass to its last write.",
        "s",
        quantiles("rollout_operator_reconcile_duration_seconds", "job", JOB),
    ),
    Panel(
        "Queue wait",
        "How long pools waited once they were due.",
        "s",
        quantiles("rollout_operator_queue_wait_seconds", "job", JOB),
    ),
    Panel(
        "Queue depth",
        "Pools that are due and waiting.",
        "short",
        ((f"max by (job) (rollout_operator_queue_depth{{{JOB}}})", "{{job}}"),),
    ),
    Panel(
        "API server requests",
        "Per second, by verb and resource.",
        "reqps",
        (summed("rollout_operator_api_requests_total", "job, verb, resource", JOB),),
    ),
    Panel(
        "Failed API server requests",
        "Per second, by code; 0 means no answer.",
        "reqps",
        (summed("rollout_operator_api_requests_total", "job, code", JOB + ',code!~"2..|404|409"'),),
    ),
    Panel(
        "Event loop lag",
        "How late timers ran: the worst of the last 30 seconds.",
        "s",
        (
            (
                f"max by (job, pod) (rollout_operator_event_loop_lag_seconds{{{JOB}}})",
                "{{job}} {{pod}}",
            ),
        ),
    ),
    Panel(
        "Missed watch events",
        "Per second: deletions found only by a full list.",
        "ops",
        ((summed("rollout_operator_ghosts_total", "job", JOB)[0], "{{job}} ghosts"),),
    ),
)


def dashboards() -> dict[str, str]:
    """Return file names and JSON texts."""
    pools = _dashboard("rollout-pools", "Rollout pools", POOLS, ("namespace", "pool"))
    operator = _dashboard("rollout-operator", "Rollout operator", OPERATOR, ("job",))
    return {
        "rollout-pools.json": json.dumps(pools, indent=1) + "\n",
        "rollout-operator.json": json.dumps(operator, indent=1) + "\n",
    }


def _dashboard(uid: str, title: str, panels: tuple[Panel, ...], chosen: tuple[str, ...]) -> Doc:
    return {
        "uid": uid,
        "title": title,
        "tags": ["rollout"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), *(_choice(label) for label in chosen)]},
        "panels": [_panel(i, panel) for i, panel in enumerate(panels)],
    }


def _datasource() -> Doc:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }


def _choice(label: str) -> Doc:
    within = '{namespace=~"$namespace"}' if label == "pool" else ""
    metric = "rollout_operator_leader" if label == "job" else "rollout_pool_replicas"
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": f"label_values({metric}{within}, {label})", "refId": label},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(index: int, panel: Panel) -> Doc:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": index + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": source,
        "gridPos": {
            "x": index % COLUMNS * WIDTH,
            "y": index // COLUMNS * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": expr, "legendFormat": legend}
            for i, (expr, legend) in enumerate(panel.queries)
        ],
    }
