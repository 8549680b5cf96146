"""One engine's worker on one device, the models it serves, and plain transformers to judge it by."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from rollout_worker.observe.processes import ProcessHandle, find_descendants
from rollout_worker.observe.worker_telemetry import resident_bytes
from rollout_worker.sources.checkpoint_files import open_source
from tests.support.engine.engine_kinds import CACHE, KINDS, ROOT, EngineKind
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels, half_billion, many_experts
from tests.support.engine.workers import Command
from tests.support.waiting import until_sync

Device = Literal["cuda", "cpu"]

START_SECONDS = 900.0
CALL_SECONDS = 300.0
SIZES = ("tiny", "0.5b")
MOE = "128 experts"
"""The model size of one variant."""
GPU = "gpu-0"
"""The name of the device for which the worker takes turns."""
MAPPED = re.compile(r"staged weights of (\d+) bytes are mapped by (\d+) of (\d+) ranks")
"""What the worker logs once its engine's ranks have mapped a version."""


class Wrong(Exception):
    """A check failed; the text says what is wrong."""


class NotHere(Exception):
    """A check can't run in this scene; the text says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `out` gets the artefacts; `idle_seconds` is how long the idle check waits."""

    device: Device
    size: str
    out: Path
    idle_seconds: float
    pythons: dict[str, Path] = field(default_factory=dict)
    extra: tuple[str, ...] = ()

    @property
    def running(self) -> int:
        """Requests that run at once while weights are committed."""
        return 32 if self.device == "cuda" else 6

    @property
    def length(self) -> int:
        """Tokens of each: it must still run when the commit comes."""
        return 1000 if self.device == "cuda" else 500

    def python(self, engine: str) -> Path | None:
        """Return the interpreter that has the engine, None if no environment is known to have it."""
        if engine in self.pythons:
            return self.pythons[engine]
        package = {"hf": "transformers"}.get(engine, engine)
        if importlib.util.find_spec(package) is not None:
            return Path(sys.executable)
        made = KINDS[engine].python
        return made if self.device == "cpu" and made.exists() else None


class Models:
    """A model and two later versions of it; each is made once and kept in the cache."""

    def __init__(self, size: str, dtype: str = "bfloat16", device: Device = "cpu") -> None:
        self._size, self._dtype, self._device = size, dtype, device
        self._tiny = TinyModels(CACHE / "models")
        self._judges: dict[int, Reference] = {}

    @property
    def exact(self) -> bool:
        """Whether numbers can be compared as float32: logits of the judge are never rounded."""
        return self._size == "tiny" or self._dtype == "float32"

    def folder(self, seed: int) -> Path:
        """Return the model folder of seed 1, or the weights of a later one."""
        if self._size == "tiny":
            return self._tiny.model(1) if seed == 1 else self._tiny.weights(seed)
        make = many_experts if self._size == MOE else half_billion
        return make(CACHE / "models", seed, self._dtype)

    def judge(self, version: int) -> Reference:
        """Return plain transformers with the weights of a version: 0 is the checkpoint."""
        seed = version_seed(version)
        if seed not in self._judges:
            folder = self._tiny.model(seed) if self._size == "tiny" else self.folder(seed)
            self._judges[seed] = Reference(folder, device=self._device)
        return self._judges[seed]

    def warm_judges(self) -> None:
        """Have both judges take what they need of a GPU, before its memory is measured.

        On 16 cores they would need minutes for tokens that a GPU makes in seconds.
        """
        if self._device == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for each new length
            for version in (0, 1):
                self.judge(version).raw_logprobs([1], [1] * 1000)


def version_seed(version: int) -> int:
    """Versions 0, 1, 2, 3, … are seeds 1, 2, 1, 2, …: there and back."""
    return 1 + version % 2


class Scene:
    """A running worker of one engine, seen from outside: its two ports, log, processes, memory."""

    def __init__(self, plan: Plan, engine: str, models: Models) -> None:
        python = plan.python(engine)
        assert python is not None
        self.plan, self.engine, self.models = plan, engine, models
        self.kind: EngineKind = replace(KINDS[engine], python=python)
        self.folder = plan.out / engine
        self.folder.mkdir(parents=True, exist_ok=True)
        self.version = 0
        models.warm_judges()
        self.memory_before = self.memory()
        flags = self.kind.flags if plan.device == "cpu" else ()
        device = ("--device", plan.device) if engine == "hf" else ()
        began = time.monotonic()
        roots = ("--weights-roots", str(CACHE / "models"))
        self.turn_directory = self.folder / "turn"
        self.turn_directory.mkdir(exist_ok=True)
        turns = ("--turn-directory", str(self.turn_directory), "--turn-devices", GPU)
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
        self.worker = Command(
            models.folder(1),
            self.folder / "worker.log",
            (
                "--engine",
                engine,
                "--shutdown-grace",
                "0",
                *device,
                *roots,
                *turns,
                *flags,
                *plan.extra,
            ),
            {"PYTHONPATH": path, **self.kind.env},
            python=python,
        )
        for client in (self.worker.data, self.worker.control):
            client.timeout = CALL_SECONDS
        try:
            self.await_active(START_SECONDS)
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.monotonic() - began

    @cached_property
    def policies(self) -> Sequence[str]:
        """In-flight policies that the engine declares."""
        return tuple(self.worker.data.get("/v1/info").json()["capabilities"]["in_flight"])

    @property
    def exact(self) -> bool:
        """Whether logits of the judge are never rounded."""
        return self.models.exact

    @property
    def tolerance(self) -> float:
        """Most that a logprob may differ from the judge's, in nats."""
        if self.exact:
            return 1e-3 if self.plan.device == "cuda" else 1e-4
        return 0.25  # bfloat16 has 8 bits: logits of 10 are known to 0.04

    def await_active(self, seconds: float) -> None:
        """Wait until the engine serves; raise `Wrong` if its first start failed."""

        def up() -> bool:
            state = self.worker.state()
            if state["lifecycle"] == "Failed" and not state["restarts"]:
                raise Wrong(f"the engine did not start: {state['last_error']}")
            return bool(state["lifecycle"] == "Active")

        until_sync(up, seconds, what="the engine")

    def settle(self) -> None:
        """After a check that failed, wait until the engine serves again, awake."""

        def over() -> bool:
            return bool(self.worker.state()["lifecycle"] in ("Active", "Asleep"))

        until_sync(over, CALL_SECONDS, what="the engine to settle")
        if self.worker.state()["lifecycle"] == "Asleep":
            self.worker.call_verb("wake")

    def update(self, **fields: Any) -> dict[str, Any]:
        self.stage()
        return self.commit(**fields)

    def stage(self) -> None:
        times = {"deadline_seconds": CALL_SECONDS, "seconds": CALL_SECONDS}
        slot = self.worker.stage(1, self.version + 1, self.next_folder, **times)
        if slot["phase"] != "Staged":
            raise Wrong(f"staging version {self.version + 1}: {slot['error']}")

    @property
    def next_folder(self) -> Path:
        return self.models.folder(version_seed(self.version + 1))

    @property
    def version_tensors(self) -> int:
        return len(open_source(self.next_folder).entries)

    def held(self) -> tuple[int, ...]:
        """Return for the version staged last: bytes, ranks that mapped it, all ranks."""
        found = MAPPED.findall((self.folder / "worker.log").read_text())
        if not found:
            raise Wrong("no rank has mapped what was staged: see worker.log")
        return tuple(map(int, found[-1]))

    def commit(self, **fields: Any) -> dict[str, Any]:
        done = self.worker.commit(1, self.version + 1, **fields)
        self.version += 1
        return done

    def family(self) -> set[ProcessHandle]:
        return find_descendants(self.worker.process.pid)

    def memory(self) -> float:
        """Return MiB in use: of the whole GPU, or resident in the worker and its processes."""
        if self.plan.device == "cuda":
            return gpu_mib()
        if not hasattr(self, "worker"):
            return 0.0
        return resident_bytes(self.worker.process.pid) / 2**20

    def close(self) -> None:
        self.worker.end_all()


def gpu_mib() -> float:
    """Return the MiB in use on the first GPU that CUDA sees, without what judges only keep for later."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
    words = ["nvidia-smi", f"--id={visible}", "--query-gpu=memory.used"]
    words.append("--format=csv,noheader,nounits")
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return float(done.stdout.splitlines()[0])
