"""Makes the chart's Grafana dashboards, pools and operator; one file, as panels are mostly text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Doc = dict[str, Any]

WIDTH, HEIGHT, COLUMNS = 8, 8, 3
POOL = 'namespace=~"$namespace",pool=~"$pool"'


@dataclass(frozen=True)
class Panel:
    """One graph: `queries` are (expression, legend)."""

    title: str
    meaning: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


def quantiles(metric: str, selector: str, by: str) -> tuple[tuple[str, str], ...]:
    """Return median and p99 of a histogram."""
    rate = f"sum by (le, {by}) (rate({metric}_bucket{{{selector}}}[$__rate_interval]))"
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
    return tuple(
        (f"histogram_quantile({q}, {rate})", f"{legend} p{q * 100:g}") for q in (0.5, 0.99)
    )


def summed(metric: str, by: str = "namespace, pool", selector: str = POOL) -> tuple[str, str]:
    """Return the rate of a counter, summed."""
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
    return f"sum by ({by}) (rate({metric}{{{selector}}}[$__rate_interval]))", legend


def gauge(metric: str, by: str = "namespace, pool", more: str = "") -> tuple[str, str]:
    """Return a gauge of the chosen pools, summed."""
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
    return f"sum by ({by}) ({metric}{{{POOL}{more}}})", legend


def version_of(which: str) -> tuple[str, str]:
    return (
        f'rollout_pool_weights_version{{{POOL},which="{which}"}}',
        f"{{{{namespace}}}}/{{{{pool}}}} {which}",
    )


POOLS = (
    Panel(
        "Replicas",
        "Replicas that are desired, that exist, that serve, that are asleep and that do not answer.",
        "short",
        (
            (f"rollout_pool_replicas_desired{{{POOL}}}", "{{pool}} desired"),
            (f"rollout_pool_replicas{{{POOL}}}", "{{pool}} total"),
            (f"rollout_pool_replicas_ready{{{POOL}}}", "{{pool}} serving"),
            (f"rollout_pool_replicas_asleep{{{POOL}}}", "{{pool}} asleep"),
            (f"rollout_pool_replicas_unreachable{{{POOL}}}", "{{pool}} unreachable"),
        ),
    ),
    Panel(
        "True conditions",
        "1 for each condition that is True; Degraded should never be.",
        "short",
        (
            (
                f'rollout_pool_condition{{{POOL},status="True"}}',
                "{{pool}} {{type}}",
            ),
        ),
    ),
    Panel(
        "Weights version",
        "Target and committed version; they differ while an update is in progress.",
        "short",
        (version_of("target"), version_of("committed")),
    ),
    Panel(
        "Weights epoch",
        "Increases when another trainer takes over.",
        "short",
        ((f'rollout_pool_weights_epoch{{{POOL},which="committed"}}', "{{pool}}"),),
    ),
    Panel(
        "Weights updates",
        "From the start of an update to its outcome, over the whole pool.",
        "s",
        quantiles("rollout_pool_weights_update_seconds", POOL, "pool, outcome"),
    ),
    Panel(
        "Updates by outcome",
        "In the last hour.",
        "short",
        (
            (
                f"sum by (pool, outcome) (increase(rollout_pool_weights_update_seconds_count{{{POOL}}}[1h]))",
                "{{pool}} {{outcome}}",
            ),
        ),
    ),
    Panel(
        "Replica restarts",
        "In the last hour, and the most failures in a row of one replica.",
        "short",
        (
            (f"increase(rollout_pool_restarts_total{{{POOL}}}[1h])", "{{pool}}"),
            (f"rollout_pool_consecutive_failures{{{POOL}}}", "{{pool}} in a row"),
        ),
    ),
    Panel(
        "Failed control calls",
        "Calls of the operator to control ports that were refused or not answered, per second.",
        "short",
        (summed("rollout_pool_failed_calls_total", "pool, verb"),),
    ),
    Panel(
        "Engine restarts",
        "Engine restarts inside their workers, in the last hour.",
        "short",
        (
            (
                f"sum by (namespace, pool) (increase(rollout_worker_engine_restarts_total{{{POOL}}}[1h]))",
                "{{pool}}",
            ),
        ),
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
        (summed("rollout_worker_requests_total", "pool, stop_reason"),),
    ),
    Panel(
        "Refused requests",
        "Per second, by reason: 409, 429 and 503, which callers try again, and what is wrong with them.",
        "reqps",
        (summed("rollout_worker_refused_total", "pool, reason"),),
    ),
    Panel(
        "Requests",
        "Running and queued.",
        "short",
        (
            gauge("rollout_worker_requests_in_flight", "pool"),
            (gauge("rollout_worker_requests_queued", "pool")[0], "{{pool}} queued"),
        ),
    ),
    Panel(
        "Request duration",
        "From acceptance to completion.",
        "s",
        quantiles("rollout_worker_request_duration_seconds", POOL, "pool"),
    ),
    Panel(
        "Time to first token",
        "From acceptance to the first token.",
        "s",
        quantiles("rollout_worker_time_to_first_token_seconds", POOL, "pool"),
    ),
    Panel(
        "Time between tokens",
        "Of one output; the mean where several tokens arrive together.",
        "s",
        quantiles("rollout_worker_inter_token_seconds", POOL, "pool"),
    ),
    Panel(
        "Weights update of a worker",
        "Duration of each phase.",
        "s",
        quantiles("rollout_worker_weights_update_seconds", POOL, "phase"),
    ),
    Panel(
        "Engine pause during commit",
        "Time during which an engine could generate no tokens.",
        "s",
        quantiles("rollout_worker_engine_pause_seconds", POOL, "pool"),
    ),
    Panel(
        "Lifecycle transitions",
        "Duration of sleep, wake, pause and other transitions.",
        "s",
        quantiles("rollout_worker_transition_seconds", POOL, "transition"),
    ),
    Panel(
        "Wait for the turn",
        "Time until a worker that shares its devices may use them.",
        "s",
        quantiles("rollout_worker_turn_wait_seconds", POOL, "pool"),
    ),
    Panel(
        "Workers by state",
        "How many workers are in each lifecycle state.",
        "short",
        (gauge("rollout_worker_lifecycle_state", "state"),),
    ),
    Panel(
        "Resident memory",
        "Host memory of the workers, not GPU memory. It grows during level-1 sleep of vLLM: the weights move there.",
        "bytes",
        (gauge("rollout_worker_memory_resident_bytes", "pool, pod"),),
    ),
)

OPERATOR = (
    Panel(
        "Leaders", "Should be 1.", "short", (("sum(rollout_operator_leader)", "leaders"),), "stat"
    ),
    Panel(
        "Pools",
        "Pools known to the leader.",
        "short",
        (("count(rollout_pool_replicas)", "pools"),),
        "stat",
    ),
    Panel(
        "Time since last watch event",
        "By resource; a quiet cluster has long gaps.",
        "s",
        (
            (
                "time() - max by (resource) (rollout_operator_watch_last_event_timestamp_seconds)",
                "{{resource}}",
            ),
        ),
    ),
    Panel(
        "Reconcile passes",
        "Per second, by result.",
        "ops",
        (summed("rollout_operator_reconcile_total", "result", ""),),
    ),
    Panel(
        "Pass duration",
        "From the start of a pass to its last write.",
        "s",
        quantiles("rollout_operator_reconcile_duration_seconds", "", "job"),
    ),
    Panel(
        "Queue wait",
        "How long pools waited once they were due.",
        "s",
        quantiles("rollout_operator_queue_wait_seconds", "", "job"),
    ),
    Panel(
        "Queue depth",
        "Pools that are due and waiting.",
        "short",
        (("max(rollout_operator_queue_depth)", "due"),),
    ),
    Panel(
        "API server requests",
        "Per second, by verb and resource.",
        "reqps",
        (summed("rollout_operator_api_requests_total", "verb, resource", ""),),
    ),
    Panel(
        "Failed API server requests",
        "Per second, by code; 0 means no answer.",
        "reqps",
        (summed("rollout_operator_api_requests_total", "code", 'code!~"2..|404|409"'),),
    ),
    Panel(
        "Event loop lag",
        "How late timers ran: the worst of the last 30 seconds.",
        "s",
        (("max by (pod) (rollout_operator_event_loop_lag_seconds)", "{{pod}}"),),
    ),
    Panel(
        "Missed watch events",
        "Per second: deletions found only by a full list, and own writes that the watch never showed.",
        "ops",
        (
            ("sum(rate(rollout_operator_ghosts_total[$__rate_interval]))", "ghosts"),
            summed("rollout_operator_expectation_timeouts_total", "resource", ""),
        ),
    ),
)


def dashboards() -> dict[str, str]:
    """Return file names and JSON texts."""
    pools = _dashboard("rollout-pools", "Rollout pools", POOLS, ("namespace", "pool"))
    operator = _dashboard("rollout-operator", "Rollout operator", OPERATOR, ())
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
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": f"label_values(rollout_pool_replicas{within}, {label})", "refId": label},
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
