"""A worker that trainers lend weights to, as a process that may be killed before any of its messages, and here.

lending_worker.main([KILL_AT, *FLAGS])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from rollout_client.turn import HeldTurn, local_turn
from rollout_client.turn.lending import LentVersion
from rollout_common.turn.lock_files import holders
from rollout_worker.__main__ import main as serve
from rollout_worker.device_turn import DeviceTurn
from rollout_worker.engines.shared_memory import lent_reading
from rollout_worker.ports import borrowed_version, lending_port
from tests.support.engine.lending_trainer import count_messages, read_tensors
from tests.support.engine.reference import Reference
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT, Client, InProcess, in_process
from tests.support.waiting import until_sync

GPUS = ("gpu-0", "gpu-1")
WeightsIdentity = tuple[int, int]
"""Epoch and version."""


def main(arguments: Sequence[str]) -> int:
    """Serve; KILL_AT counts the messages that the worker and its engine send to trainers and each other."""
    kill_at, *flags = arguments
    modules = lending_port, borrowed_version, lent_reading
    count_messages(int(kill_at), modules, ("send_message",))
    return serve(["serve", *flags])


def turn_flags(directory: Path, holder: str = "w") -> list[str]:
    """Flags of a worker that takes turns for two devices."""
    return [
        *("--turn-directory", str(directory), "--turn-devices", ",".join(GPUS)),
        *("--turn-holder", holder),
    ]


def tokens_of(worker: Client) -> list[int]:
    """What the worker's weights make of the prompt."""
    until_sync(lambda: worker.state()["lifecycle"] == "Active", 20, what="the worker to serve")
    found: list[int] = worker.sample(8)["token_ids"]
    return found


def wake_up(worker: Client) -> list[int]:
    """Wake it; return its tokens."""
    worker.post("wake")
    return tokens_of(worker)


def next_version(worker: Client) -> WeightsIdentity:
    active = worker.state()["weights"]["active"]
    return max(1, active["epoch"]), active["version"] + 1


def fall_asleep(worker: Client, directory: Path) -> None:
    """Sleep at level 2, until the turn is free."""
    assert worker.post("sleep", level=2).json()["lifecycle"] == "Asleep"
    until_sync(lambda: not any(holders(directory).values()), what="the worker's turn to end")


def turn_of(worker: InProcess) -> DeviceTurn:
    turn = worker.worker.runtime.turn
    assert turn is not None
    return turn


def has_turn(worker: InProcess) -> bool:
    """Whether a lent turn is the worker's alone; waits until it has seen its trainer leave or end."""
    turn = turn_of(worker)
    until_sync(lambda: turn.lender_left.is_set() or not turn.is_lent, what="the trainer's end")
    return turn.is_lent


def lend(
    turn: HeldTurn, identity: WeightsIdentity, tensors: dict[str, Tensor], seconds: float = 60
) -> LentVersion:
    """Lend tensors in buckets of 1 MiB."""
    epoch, version = identity
    return turn.hand_over(
        version, tensors.items(), epoch=epoch, seconds=seconds, bucket_bytes=1 << 20
    )


def serve_lent(worker: InProcess, identity: WeightsIdentity) -> list[int]:
    """Commit what was lent; return its tokens."""
    worker.post("wake", tags=["weights"], load=False)
    worker.commit(*identity, in_flight="Abort")
    return wake_up(worker)


@dataclass(frozen=True)
class LendingRig:
    """An hf worker on two devices, and what its trainer has.

    `tensors`: by the seeds of the weights; `tokens`: what they make of the prompt, greedily.
    """

    worker: InProcess
    directory: Path
    models: TinyModels
    tensors: dict[int, dict[str, Tensor]]
    tokens: dict[int, list[int]]

    def sleep_anew(self) -> WeightsIdentity:
        """Give the worker the weights of seed 1 from files, and let it sleep; return the next identity."""
        wake_up(self.worker)
        self.worker.update(*next_version(self.worker), self.models.weights(1))
        identity = next_version(self.worker)
        fall_asleep(self.worker, self.directory)
        return identity

    def take_turn(self, devices: Sequence[str] = GPUS) -> AbstractContextManager[HeldTurn]:
        """Take the trainer's turn on these devices."""
        return local_turn(devices, self.directory, seconds=20)


@contextmanager
def lending_rig(models: TinyModels, directory: Path, *flags: str) -> Iterator[LendingRig]:
    """Start its worker, with more flags."""
    flags = *flags, *turn_flags(directory), "--weights-port", "0", "--restart-delays", "0"
    folders = {seed: models.weights(seed) for seed in (1, 2, 3)}
    tensors = {seed: read_tensors(folder) for seed, folder in folders.items()}
    tokens = {seed: Reference(folder).greedy(PROMPT, 8) for seed, folder in folders.items()}
    with in_process(models.model(1), *flags, "--weights-roots", str(models.home)) as worker:
        worker.post("require", epoch=0, min_version=0)
        yield LendingRig(worker, directory, models, tensors, tokens)
