"""A Ray of one node on this machine, for vLLM's ranks: its environment has Ray beside vLLM."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from localkube.settings import free_ports
from rollout_worker.observe import processes
from tests.support.engine.engine_kinds import CACHE, ROOT, EngineKind
from tests.support.processes import descendants
from tests.support.waiting import until_sync

ENVIRONMENT = CACHE / "env-ray"
PLUGIN = Path(__file__).parent / "rayable"
NEEDED = ("ray", "msgpack")
"""What vLLM's environment lacks of Ray's; all else has the same pins in both."""
START_SECONDS = 180.0


def packages(folder: Path) -> Path:
    """Return a folder from which vLLM's interpreter imports Ray and nothing else of its environment."""
    (found,) = ENVIRONMENT.glob("lib/python3*/site-packages")
    folder.mkdir()
    for name in NEEDED:
        for each in (found / name, *found.glob(f"{name}-*.dist-info")):
            (folder / each.name).symlink_to(each)
    return folder


def run_job(command: Sequence[str | Path], folder: Path, seconds: float, **env: str) -> str:
    """Run a program that starts a Ray of its own, and return what it printed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTEST"))}
    own = {"HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    # Else it starts as many processes as it has processors before anybody asks for one.
    own |= {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
    # Ray gives way to every other program, so that beside other tests it took six times as long.
    own["RAY_worker_niceness"] = "0"
    # On a busy machine its processes take minutes to meet.
    own["RAY_raylet_start_wait_time_s"] = "400"
    done = subprocess.run(
        command, env={**kept, **own, **env}, cwd=folder, capture_output=True, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


class Ray:
    """A running one; `env` is the environment of a worker that uses it."""

    def __init__(self, kind: EngineKind, home: Path, gpus: int) -> None:
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        path = (str(ROOT / "src"), str(packages(home / "packages")), str(PLUGIN))
        shared = {
            "PYTHONPATH": os.pathsep.join(path),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.env: Mapping[str, str] = {**kind.env, **shared, "RAY_ADDRESS": self.address}
        self._log = home / "ray.log"
        words = [
            *(
                "-m",
                "ray.scripts.scripts",
                "start",
                "--head",
                "--block",
                "--node-ip-address=127.0.0.1",
            ),
            *(f"--port={self.address.partition(':')[2]}", f"--temp-dir={home / 'tmp'}"),
            *("--num-cpus=1", f"--num-gpus={gpus}", "--object-store-memory=100000000"),
            *("--include-dashboard=false", "--disable-usage-stats"),
        ]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(kind.python), *words],
                stdout=log,
                stderr=log,
                env={**os.environ, **shared, "HOME": str(home)},
            )
        until_sync(self._up, START_SECONDS, what="Ray")

    def _up(self) -> bool:
        told = self._log.read_text()
        assert self.process.poll() is None, told
        return "Ray runtime started" in told

    def ranks(self) -> list[int]:
        """Process ids of vLLM's ranks; Ray calls an actor by what it does, vLLM by its rank."""
        family = descendants(self.process.pid)
        names = ("RayWorkerProc", "VLLM::")
        return [each.pid for each in family if any(name in each.command for name in names)]

    def close(self) -> None:
        """End it and all that it started."""
        family = processes.find_descendants(self.process.pid)
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            processes.kill_processes(family, 10)


@contextmanager
def ray_node(kind: EngineKind, *, gpus: int) -> Iterator[Ray]:
    """Run one; its folder is short, because the names of its sockets must be."""
    home = Path(tempfile.mkdtemp(prefix="ray-"))
    try:
        ray = Ray(kind, home, gpus)
        try:
            yield ray
        finally:
            ray.close()
    finally:
        shutil.rmtree(home, ignore_errors=True)
