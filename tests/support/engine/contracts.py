"""Workers for the contract suite: a real process of each engine, in a pool, with two callers; whole.

The suite is a black box: it sees two ports, the log and the process table.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import certifi
import httpx
import pytest
from typing_extensions import override

from rollout_common.transfer.connections.frames import Kind
from rollout_worker.schemas import StagedWeights
from tests.support.engine.engine_kinds import EMBEDDED, QUEUE, ROOT, EngineKind
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT, TLS, Command
from tests.support.processes import Process, descendants
from tests.support.unit.pushing import Version, trainer
from tests.support.waiting import until_sync

VOCAB = 4096
EOS = (2, 0)
"""Ids of the tiny model's generation_config."""

GPU = "gpu-0"
"""The device for which a worker takes turns, unless it is embedded."""

HELPERS = ("resource_tracker", "forkserver", "grammar_process")
"""Python's own, and the process that checks grammars: an engine lives without them."""

Output = dict[str, Any]
T = TypeVar("T")


class Served(Command):
    """A worker of one engine; its own calls are the operator's, `trainer` is the other caller."""

    def __init__(
        self, kind: EngineKind, models: TinyModels, folder: Path, api: str, flags: Sequence[str]
    ) -> None:
        self.kind = kind
        self.models = models
        self.folder = folder
        token_file = folder / "token"
        token_file.write_text("worker")
        pool = ["--pool", "contract", "--namespace", "tests", "--auth", "kubernetes"]
        kube = ["--kube-api-url", api, "--kube-ca", certifi.where()]
        roots = ["--weights-roots", f"{folder}:{models.home}"]
        # Short: it becomes part of the names of sockets.
        self.temporary = Path(tempfile.mkdtemp(prefix="contract-"))
        self.turn_directory = self.temporary / "turn"
        self.turn_directory.mkdir()
        turns = ["--turn-directory", str(self.turn_directory), "--turn-devices", GPU]
        began = time.monotonic()
        super().__init__(
            models.model(1),
            folder / "worker.log",
            [
                *("--engine", kind.engine, "--shutdown-grace", "0", "--served-name", "tiny"),
                *("--max-queue", str(QUEUE), "--restart-delays", "0"),
                *("--weights-port", "0", "--weights-socket", str(self.temporary / "weights.sock")),
                *(*pool, *kube, "--kube-token-file", str(token_file), *roots),
                *(
                    *kind.flags,
                    *kind.narrow,
                    *kind.impatient,
                    "--tool-call-parser",
                    kind.parser,
                    *([] if kind in EMBEDDED else turns),
                    *flags,
                ),
            ],
            {"PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(self.temporary), **kind.env},
            python=kind.python,
            token="operator",
            serve=kind.serve,
        )
        for each in (self.data, self.control):
            each.timeout = httpx.Timeout(180)  # a full machine may be slow, and so be right
        headers = {"Authorization": "Bearer trainer"}
        self.trainer = httpx.Client(
            base_url=self.control.base_url,
            timeout=180,
            headers=headers,
            verify=TLS,
            trust_env=False,
        )
        self._calls: list[Future[Any]] = []
        self._made_before = 0.0
        self.said: list[str] = []
        """Distinct messages of progress while it started."""
        try:
            until_sync(self._up, kind.start_seconds, what=f"{kind.name} to start")
        except BaseException:
            self.kill()
            raise
        self.start_seconds = time.monotonic() - began
        self.require()
        self.able: dict[str, Any] = self.data.get("/v1/info").json()["capabilities"]

    def _up(self) -> bool:
        self._line("serving")  # fails if the process has ended
        state = self.state()
        progress = (state["progress"] or {}).get("message")
        if progress and progress not in self.said:
            self.said.append(progress)
        # A first start that fails is tried again, but never silently here.
        assert not state["last_error"], f"{state['last_error']}\n{self._log.read_text()[-4000:]}"
        return bool(state["lifecycle"] == "Active")

    def require(self) -> None:
        """Lift the fence, as an operator does."""
        answer = self.post("require", epoch=0, min_version=0)
        assert answer.status_code in (200, 409), answer.text

    def close(self) -> None:
        self.trainer.close()
        super().close()

    def kill(self) -> None:
        """End it and all its processes by force."""
        self.end_all()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def children(self) -> list[Process]:
        return descendants(self.process.pid)

    # Weights.

    def seed(self) -> int:
        """Which seed's weights serve."""
        return int(self.state()["weights"]["active"]["labels"].get("seed", 1))

    def next_version(self) -> tuple[int, int]:
        """The identity after the active and the staged one."""
        weights = self.state()["weights"]
        known = [(w["epoch"], w["version"]) for w in (weights["active"], weights["staged"]) if w]
        epoch, version = max(known)
        return max(1, epoch), version + 1

    def stage_next(self, seed: int) -> tuple[int, int]:
        """Stage the weights of a seed under the next identity."""
        identity = self.next_version()
        slot = self.stage(*identity, self.models.weights(seed), labels={"seed": str(seed)})
        assert slot["phase"] == "Staged", slot
        return identity

    def load(self, seed: int, **commit: Any) -> dict[str, Any]:
        """Make the weights of a seed the active ones, under the next identity."""
        return self.commit(*self.stage_next(seed), **commit)

    def push(
        self,
        given: Version,
        seed: str,
        base: tuple[int, int, Version] | None = None,
        way: Literal["unix", "tcp"] = "tcp",
    ) -> tuple[int, int]:
        """Push a version until it is staged, or what differs from one that serves; return its identity."""
        identity, pushed = self.next_version(), {}
        if base is not None:
            pushed = {"base": {**named(base[:2]), "root_hash": base[2].root_hash}}
        answer = self.post(
            "weights/stage",
            **named(identity),
            source={"pushed": pushed},
            labels={"seed": seed},
            deadline_seconds=120,
        )
        assert answer.status_code == 202, answer.text
        transfer = StagedWeights.model_validate(answer.json()).transfer
        assert transfer is not None
        with trainer(transfer, given, way) as end:
            end.keep_alive()
            if base is None:
                end.whole(transfer)
            else:
                end.base = base[2]
                end.whole(transfer, base=pushed["base"])
            told = end.answer()
            assert told.kind is Kind.STAGED, told.head
        return identity

    # Requests.

    def outputs(self, sampling: Mapping[str, Any] | None = None, **fields: Any) -> list[Output]:
        """The outputs of one request, which must come."""
        body = {"token_ids": PROMPT, **fields}
        return outputs_of(self.generate(sampling=dict(sampling or {}), **body))

    def busy(
        self, count: int, max_tokens: int = 400, **fields: Any
    ) -> Callable[[], list[httpx.Response]]:
        """Begin many sampled requests; returns once all run. Call the result for the answers."""
        sampling = {"max_tokens": max_tokens, "ignore_eos": True, **fields.pop("sampling", {})}
        started = [
            self.in_background(lambda: self.generate(sampling=sampling, **fields))
            for _ in range(count)
        ]
        until_sync(
            lambda: self.state()["in_flight"] >= count or all(f.done() for f in started),
            30,
            what=f"{count} requests to run",
        )
        return lambda: [future.result(120) for future in started]

    def made(self) -> float:
        """Tokens that this process has generated so far."""
        for line in self.data.get("/metrics").text.splitlines():
            if line.startswith("rollout_worker_generated_tokens_total"):
                return float(line.rpartition(" ")[2])
        raise AssertionError("no metric of generated tokens")

    @override
    def in_background(self, function: Callable[[], T]) -> Future[T]:
        if all(each.done() for each in self._calls):
            self._calls.clear()
            self._made_before = self.made()
        call = super().in_background(function)
        self._calls.append(call)
        return call

    def makes(self, tokens: int) -> None:
        """Wait until so many tokens were made since the calls that run began, or since the last time.

        Counted from here, tokens might never come: on a busy machine an output may end before the first answer.
        """
        upto = self._made_before + tokens
        until_sync(lambda: self.made() >= upto, 30, what=f"{tokens} tokens")
        self._made_before = self.made()

    # Between tests.

    def heal(self) -> None:
        """Bring it back to Active, idle, and the weights of seed 1, whatever a test left."""
        until_sync(self._loaded, self.kind.start_seconds, what="the engine to be back")
        state = self.state()
        quiet = state["serving"] and not (state["holds"] or state["in_flight"] or state["queued"])
        if quiet and int(state["weights"]["active"]["labels"].get("seed", 1)) == 1:
            return
        if self.seed_unknown():
            self.require()
        for client in (self.control, self.trainer):
            client.post("/v1/abort", json={"all": True})
            for verb in ("wake", "resume"):
                client.post(f"/v1/{verb}", json={})
        until_sync(self.ready, 60, what="the worker to serve")
        until_sync(self.idle, 30, what="requests to end")
        if self.seed() != 1:
            self.load(1, in_flight="Abort")

    def engine_processes(self) -> list[Process]:
        """The engine's processes: what Python keeps beside them lives as long as the worker."""
        helper = re.compile("|".join(HELPERS))
        return [process for process in self.children() if not helper.search(process.command)]

    def kill_engine(self) -> None:
        """Kill the process of the engine that was started last, and wait until the worker has noticed."""
        os.kill(max(self.engine_processes(), key=lambda each: each.started).pid, signal.SIGKILL)
        until_sync(lambda: not self.ready(), 30, what="the worker to notice")

    def seed_unknown(self) -> bool:
        """Whether the worker is fenced."""
        return bool(self.state()["weights"]["required"] is None)

    def _loaded(self) -> bool:
        assert self.process.poll() is None, f"the worker ended: {self.process.returncode}"
        return self.state()["lifecycle"] not in ("Starting", "Loading", "Failed")

    def idle(self) -> bool:
        state = self.state()
        return bool(state["in_flight"] == state["queued"] == 0)


def named(identity: tuple[int, int]) -> dict[str, Any]:
    """An identity as fields of a body."""
    return dict(zip(("epoch", "version"), identity, strict=True))


def outputs_of(answer: httpx.Response) -> list[Output]:
    """The outputs of an answer, which must be sound."""
    assert answer.status_code == 200, answer.text
    outputs: list[Output] = answer.json()["outputs"]
    for output in outputs:
        sound(output)
    return outputs


def sound(output: Output) -> None:
    """Check what every output promises: spans cover it in order, every token has its logprob."""
    count, spans = len(output["token_ids"]), output["weights"]
    assert [s["start"] for s in spans] == [0, *(s["end"] for s in spans)][: len(spans)]
    assert (spans[-1]["end"] if spans else 0) == count
    assert all(s["start"] < s["end"] for s in spans)
    if "logprobs" in output:
        assert len(output["logprobs"]) == count
        assert all(-1e4 < p <= 1e-6 for p in output["logprobs"]), output["logprobs"]
    for rows in output.get("top_logprobs", {}).values():
        assert len(rows) == count
    assert (output["stop_reason"] == "aborted") is (output["abort_reason"] is not None)
    assert (output["stop_match"] is not None) is (output["stop_reason"] == "stop")


def level_of(worker: Served, level: int) -> int:
    """Return the level; skip the test if the engine has no such sleep."""
    if level not in worker.able["sleep_levels"]:
        pytest.skip(f"{worker.kind} declares no sleep level {level}")
    return level


def made_by(output: Output) -> list[tuple[int, bool]]:
    """Versions and staleness of the spans."""
    return [(s["version"], s["stale_kv"]) for s in output["weights"]]


def pieces(events: list[tuple[str, dict[str, Any]]], index: int) -> Output:
    """Put an output of a stream together again."""
    *deltas, (name, done) = events
    assert name == "done"
    assert {n for n, _ in deltas} <= {"delta"}
    mine = [delta for _, delta in deltas if delta["index"] == index]
    [end] = [output for output in done["outputs"] if output["index"] == index]
    kept = [p for delta in mine for p in delta.get("logprobs", ())]
    return {
        **end,
        "token_ids": [token for delta in mine for token in delta["token_ids"]],
        **({"logprobs": kept} if kept else {}),
        **_joined_rows([delta["top_logprobs"] for delta in mine if "top_logprobs" in delta]),
        "weights": _merged(span for delta in mine for span in delta["weights"]),
    }


def _joined_rows(tops: list[dict[str, Any]]) -> dict[str, Any]:
    """The most likely tokens of all deltas, if there are any."""
    if not tops:
        return {}
    fields = ("token_ids", "logprobs")
    return {"top_logprobs": {name: [row for top in tops for row in top[name]] for name in fields}}


def _merged(spans: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    keys = ("epoch", "version", "stale_kv")
    for span in spans:
        if merged and all(merged[-1][k] == span[k] for k in keys):
            assert merged[-1]["end"] == span["start"]
            merged[-1] = {**merged[-1], "end": span["end"]}
        else:
            merged.append(span)
    return merged


class Fleet:
    """At most one worker of one engine at a time: two would not fit a small machine."""

    def __init__(self, kind: EngineKind, models: TinyModels, home: Path, api: str) -> None:
        self._kind, self._models, self._home, self._api = kind, models, home, api
        self._flags: tuple[str, ...] = ()
        self._failed: dict[tuple[str, ...], str] = {}
        self._worker: Served | None = None
        self._numbers = itertools.count()

    def worker(self, *flags: str) -> Served:
        """The worker with these flags; another one is stopped first."""
        assert flags not in self._failed, f"it did not start before: {self._failed[flags]}"
        if self._worker is None or self._flags != flags or self._worker.process.poll() is not None:
            self.stop()
            folder = self._home / f"{self._kind}-{next(self._numbers)}"
            folder.mkdir()
            try:
                self._worker = Served(self._kind, self._models, folder, self._api, flags)
            except AssertionError as error:
                self._failed[flags] = str(error)
                raise
            self._flags = flags
        return self._worker

    def present_worker(self) -> Served:
        """The worker that runs, whatever its flags: for tests that no flag matters to."""
        return self.worker(*self._flags)

    def stop(self) -> None:
        """End the present worker, by force if need be, with all its processes."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        family = worker.children()
        try:
            worker.terminate()
            worker.process.wait(60)
            gone = "the engine's processes to end"
            until_sync(lambda: not any(p.alive for p in family), 20, what=gone)
        finally:
            worker.kill()
