"""Two real workers with one device between them: by turns, whoever is stopped or killed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import Command, command
from tests.support.waiting import until_sync

GPU = "gpu.example.com/node-1/gpu-0"


class Judge:
    """Asks all the time who has memory of the device."""

    def __init__(self, workers: list[Command]) -> None:
        self._workers = workers
        self._ended = threading.Event()
        self.both = 0
        self.looks = 0
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        first, second = (str(worker.control.base_url) for worker in self._workers)
        # Its own connections: who is stopped keeps an answer waiting.
        with httpx.Client(timeout=0.2, trust_env=False) as client:
            while not self._ended.wait(0.01):
                # The first one again: memory may change hands between two looks.
                answers = [_resident(client, url) for url in (first, second, first)]
                self.looks += None not in answers
                self.both += all(answers)

    def end(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join(30)


def _resident(client: httpx.Client, url: str) -> bool | None:
    try:
        resident = client.get(f"{url}/v1/state").json()["resident"]
    except httpx.HTTPError:
        return None
    return any(resident.values())


@contextmanager
def judged(*workers: Command) -> Iterator[Judge]:
    judge = Judge(list(workers))
    try:
        yield judge
    finally:
        judge.end()


def waits(worker: Command, lifecycle: str, holder: str) -> None:
    """Until it says whom it waits for."""
    wanted = (lifecycle, f"waiting for the turn: {GPU} is held by {holder}")

    def told() -> bool:
        state = worker.state()
        return (state["lifecycle"], (state["progress"] or {}).get("message")) == wanted

    until_sync(told, 60, what=f"{wanted}")
    turn = worker.state()["turn"]
    assert turn == {"state": "Waiting", "devices": [GPU], "waiting_for": {GPU: holder}}


def active(worker: Command) -> None:
    until_sync(lambda: worker.state()["lifecycle"] == "Active", 120, what="Active")
    assert worker.state()["turn"]["state"] == "Held"


def test_two_workers_take_turns(tiny_models: TinyModels, tmp_path: Path) -> None:
    locks, model = tmp_path / "turn", tiny_models.model(1)
    for folder in (locks, tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
    turn = ("--turn-directory", str(locks), "--turn-devices", GPU, "--turn-holder")
    with (
        command(model, tmp_path / "a", *turn, "a") as a,
        command(model, tmp_path / "b", *turn, "b", wait=False) as b,
        judged(a, b) as judge,
    ):
        expected = a.sample()["token_ids"]
        waits(b, "Loading", "a")
        assert a.post("sleep").json()["turn"]["state"] == "Released"
        active(b)
        sleeper, other = a, b
        for name in ("b", "a"):
            waking = threading.Thread(target=sleeper.post, args=("wake",))
            waking.start()
            waits(sleeper, "Waking", name)
            assert other.post("sleep").status_code == 200
            waking.join(60)
            active(sleeper)
            assert sleeper.sample()["token_ids"] == expected
            sleeper, other = other, sleeper
        # `b` has it now. Stopped, it keeps it; killed, it gives way.
        waking = threading.Thread(target=a.post, args=("wake",))
        waking.start()
        waits(a, "Waking", "b")
        b.process.send_signal(signal.SIGSTOP)
        waits(a, "Waking", "b")
        b.process.kill()
        waking.join(60)
        active(a)
        assert a.sample()["token_ids"] == expected
    assert judge.looks > 20
    assert judge.both == 0
