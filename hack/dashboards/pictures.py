"""Draw the panels of the chart's dashboards from a recording: Grafana's components in a headless Chromium.

Everything that is downloaded stays in the cache: the packages that package-lock.json pins, and the browser of Debian.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo.monitoring import query, run_prometheus
from localkube import ClusterError, debian
from localkube.home import REPOSITORY, cache, exclusive, step
from tests.support.waiting import until_sync

HERE = Path(__file__).parent
DASHBOARDS = REPOSITORY / "charts" / "rollout-operator" / "dashboards"
BROWSER = {"chromium-headless-shell": "/usr/bin/chromium-headless-shell", "npm": "/usr/bin/npm"}
COLUMN, ROW, GAP = 58, 38, 8
"""Pixels of a column and of a row of the grid, on a screen of 1400; between panels."""
INSTALL_SECONDS = 900
"""465 MB are unpacked; a minute on a calm machine."""
ANSWER_SECONDS = 60.0
"""Until Prometheus has read the recording, and for each step of the browser."""
DRAW_SECONDS = 600
"""For all panels; half a minute on a calm machine."""
SETTLE_SECONDS = 0.4
"""From the last answer to the picture: a panel draws its lines once the browser has laid it out."""


def install_modules() -> Path:
    """Return the folder of the packages; install those of package-lock.json if it is another one."""
    debian.ensure(BROWSER)
    home = cache() / "dashboards"
    lock = HERE / "package-lock.json"
    with exclusive("dashboards"):
        done = home / "node_modules" / ".lock"
        if not (done.exists() and done.read_bytes() == lock.read_bytes()):
            home.mkdir(parents=True, exist_ok=True)
            for name in ("package.json", "package-lock.json"):
                shutil.copy(HERE / name, home)
            with step("Grafana's components"):
                _run_node(
                    ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
                    home,
                    INSTALL_SECONDS,
                )
            done.write_bytes(lock.read_bytes())
    return home / "node_modules"


def _run_node(command: list[str], where: Path, seconds: float) -> str:
    done = subprocess.run(
        command, cwd=where, capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode:
        raise ClusterError(f"{command[0]} {command[1]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


@contextmanager
def recorded_prometheus(recording: Path) -> Iterator[str]:
    """Run Prometheus over a recording, however old; yields its address."""
    program = debian.unpack_prometheus() / "prometheus"
    kept = "--storage.tsdb.retention.time=100y"
    with run_prometheus(program, recording, {}, kept) as address:
        until_sync(lambda: query(address, "vector(1)"), ANSWER_SECONDS, what="Prometheus to answer")
        yield address


def wanted_panels(out: Path, only: str | None) -> Iterator[dict[str, Any]]:
    """Yield each panel with the file and the size of its picture."""
    for path in sorted(DASHBOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            name = "-".join(panel["title"].lower().split())
            if only is None or only in name:
                size = panel["gridPos"]
                yield {
                    "panel": panel,
                    "file": str(out / f"{path.stem}-{name}.png"),
                    "width": size["w"] * COLUMN - GAP,
                    "height": size["h"] * ROW - GAP,
                }


def draw_panels(recording: Path, out: Path, only: str | None = None) -> list[Path]:
    """Draw every panel, or those whose names contain `only`; return the PNG files, in `out`."""
    modules = install_modules()
    out.mkdir(parents=True, exist_ok=True)
    told = json.loads((recording / "recorded.json").read_text())
    panels = list(wanted_panels(out, only))
    with recorded_prometheus(recording) as address:
        settings = {
            "page": str(HERE / "page.jsx"),
            "modules": str(modules),
            "chromium": BROWSER["chromium-headless-shell"],
            "seconds": ANSWER_SECONDS,
            "settle": SETTLE_SECONDS,
            "prometheus": address,
            "panels": panels,
            "where": {
                "range": {"from": told["from"], "to": told["to"]},
                "scrape": told["scrape"],
                "variables": {"namespace": ".*", "pool": ".*", "job": ".*"},
            },
        }
        script = modules.parent / "draw_panels.mjs"  # imports are looked up from where it lies
        shutil.copy(HERE / script.name, script)
        file = out / "settings.json"
        file.write_text(json.dumps(settings))
        print(_run_node(["node", str(script), str(file)], HERE, DRAW_SECONDS), end="")
    return [Path(each["file"]) for each in panels]
