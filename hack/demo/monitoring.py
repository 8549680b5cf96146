"""A real Prometheus that scrapes the annotated pods of a cluster, for the duration of a block.

Debian builds Prometheus without its Kubernetes discovery, so it gets the pods that are there when it starts. In a
cluster of your own use the chart's PodMonitors or Prometheus' own `kubernetes_sd_configs`.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from localkube.settings import free_ports

from .stage import DemoError, Stage

PREFIX = "prometheus.io/"


@contextmanager
def prometheus(stage: Stage, program: Path) -> Iterator[str]:
    """Run the program over the cluster's scraped pods; yields its address."""
    with (
        tempfile.TemporaryDirectory(prefix="rollout-prometheus-") as folder,
        run_prometheus(program, Path(folder), _config(scraped_pods(stage))) as address,
    ):
        yield address


@contextmanager
def run_prometheus(
    program: Path, home: Path, settings: dict[str, Any], *flags: str
) -> Iterator[str]:
    """Run Prometheus on loopback with these settings and its files in `home`; yield its address."""
    config = home / "prometheus.yml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    (port,) = free_ports(1)
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [
                str(program),
                f"--config.file={config}",
                f"--storage.tsdb.path={home / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
                *flags,
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=15)


def _config(pods: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            # The operator's figures name the pool's namespace; ours must not hide it.
            {"job_name": "rollout", "honor_labels": True, "static_configs": pods}
        ],
    }


def scraped_pods(stage: Stage) -> list[dict[str, Any]]:
    """Return the running pods with the scrape annotation, as Prometheus wants its targets."""
    pods = json.loads(stage.run("kubectl", "get", "pods", "-A", "-o", "json"))["items"]
    out = []
    for pod in pods:
        notes = pod["metadata"].get("annotations") or {}
        ip = pod.get("status", {}).get("podIP")
        if notes.get(PREFIX + "scrape") != "true" or not ip:
            continue
        labels = {
            "__metrics_path__": notes.get(PREFIX + "path", "/metrics"),
            "namespace": pod["metadata"]["namespace"],
            "pod": pod["metadata"]["name"],
        }
        out.append({"targets": [f"{ip}:{notes[PREFIX + 'port']}"], "labels": labels})
    return out


def query(address: str, expression: str) -> list[dict[str, Any]]:
    """Return the instant vector of a query, empty while Prometheus is not up."""
    params = {"query": expression}
    try:
        answer = httpx.get(f"{address}/api/v1/query", params=params, timeout=5, trust_env=False)
        found: list[dict[str, Any]] = answer.raise_for_status().json()["data"]["result"]
    except httpx.HTTPError:
        return []
    return found


def show(stage: Stage, address: str, expressions: dict[str, int]) -> None:
    """Ask each query until it has so many series, then print them."""
    for expression, wanted in expressions.items():

        def look(expression: str = expression, wanted: int = wanted) -> list[dict[str, Any]]:
            found = query(address, expression)
            return found if len(found) >= wanted else []

        try:
            found = stage.until(f"{wanted} series of {expression}", look, 60)
        except DemoError as error:
            raise DemoError(f"{error}; targets: {scraped_pods(stage)}") from error
        stage.say(f"promql> {expression}")
        for series in sorted(found, key=lambda s: str(s["metric"])):
            labels = {
                k: v for k, v in series["metric"].items() if k in ("pod", "pool", "namespace")
            }
            stage.say(f"  {labels} {series['value'][1]}")
