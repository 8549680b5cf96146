"""The trainer of examples/grpo publishes by memory, and tells what that took beside files."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import grpo
import publishing
from demo import train
from publishing import PHASES, Clock, Publisher, Update, table, ways_of, with_transport
from rollout_client import Published, PublishProgress, WeightsId
from rollout_client.steering.steering_protocol import PublishReport, PushedTo

SECONDS = dict(zip(PHASES, (0.01, 0.02, 0.03, 0.04, 0.1), strict=True))


class Pool:
    """Publishes at once, and says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, str | None]] = []

    def acquire(self) -> int:
        return 3

    def publish_weights(self, version: int, *, tensors: Any, transport: str) -> Published:
        self.calls.append(("memory", version, transport))
        replicas = {name: PushedTo("tcp", 0.05) for name in ("a", "b")}
        return done(version, PublishReport(1 << 20, SECONDS, replicas))

    def save_and_publish(
        self, model: Any, version: int, folder: Path, *, mounted_at: Path, keep: int, progress: Any
    ) -> Published:
        self.calls.append(("files", version, None))
        for phase in ("Staging", "Staging", "Committing", "Complete"):
            progress(PublishProgress(phase, 0, 2, ""))
        return done(version, None)


def done(version: int, report: PublishReport | None) -> Published:
    return Published(WeightsId(epoch=3, version=version), None, 2, 0.2, None, "", report)


def parsed(*flags: str) -> argparse.Namespace:
    return with_transport(argparse.ArgumentParser()).parse_args(flags)


def publisher(*flags: str) -> tuple[Pool, Publisher]:
    pool, remembered = Pool(), list[Any]()
    policy = SimpleNamespace(
        model=None, remember=remembered.append, published=lambda: {"tensors": None}
    )
    ways = ways_of(parsed(*flags))
    made = Publisher(pool, policy, Path("w"), Path("m"), ways)  # type: ignore[arg-type]
    return pool, made


def test_every_version_goes_by_memory_unless_files_are_asked_for() -> None:
    for flags, expected in (((), "memory"), (("--transport=files",), "files")):
        pool, made = publisher(*flags)
        for _ in range(5):
            made.publish()
        assert {way for way, *_ in pool.calls} == {expected}
        assert made.committed == (3, 5)


def test_to_compare_each_fourth_version_goes_by_files() -> None:
    pool, made = publisher("--compare")
    for _ in range(40):
        made.publish()
    ways = [way for way, *_ in pool.calls]
    assert (ways.count("memory"), ways.count("files")) == (30, 10)
    assert {each.way for each in made.updates} == {"memory (tcp)", "files"}
    assert [each.phases for each in made.updates if each.way != "files"] == [SECONDS] * 30


def test_the_demo_pushes_and_compares() -> None:
    job = train.job(train.TASKS["counting"], 40)
    [container] = job["spec"]["template"]["spec"]["containers"]
    own = [flag for flag in container["args"] if flag.startswith(("--transport", "--compare"))]
    assert ways_of(parsed(*own)) == ("auto", "auto", "auto", "files")


def test_a_job_that_pushes_has_a_token_for_the_workers() -> None:
    for name in ("job.yaml", "tools-job.yaml"):
        job = yaml.safe_load((train.EXAMPLE / name).read_text())
        pod = job["spec"]["template"]["spec"]
        [container] = pod["containers"]
        own = [flag for flag in container["args"] if flag.startswith("--transport")]
        pushes = set(ways_of(parsed(*own))) != {"files"}
        mounted = {each["mountPath"] for each in container["volumeMounts"]}
        assert ("/var/run/secrets/rollout.dev" in mounted) == pushes, name


def test_the_table_has_a_row_for_each_way_with_medians_by_phase() -> None:
    files = [
        Update("files", seconds, {"copy": 0.3, "stage": 0.5, "commit": 0.2})
        for seconds in (0.9, 1, 2)
    ]
    memory = [
        Update("memory (tcp)", whole, {**SECONDS, "commit": commit})
        for whole, commit in ((0.2, 0.1), (0.25, 0.15), (0.9, 0.8))
    ]
    title, head, by_files, by_memory, _, ratio = table([*memory, *files]).splitlines()
    assert "median seconds" in title
    assert head.split() == ["way", "versions", "whole", *PHASES, "longest"]
    assert " ".join(by_files.split()) == "files 3 1.000 - 0.300 - 0.500 0.200 2.000"
    row = "memory (tcp) 3 0.250 0.010 0.020 0.030 0.040 0.150 0.900"
    assert " ".join(by_memory.split()) == row
    assert ratio == "by memory (tcp) a version serves in 0.25 of the time by files"


def test_the_results_hold_that_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    updates = [Update("files", 1.0, {"copy": 1.0}), Update("memory (shm)", 0.5, SECONDS)]
    row = grpo.Row(1, 0.1, 1.0, "1.1", 0, 0, 0.0, 0.5, 1.0, "files", 1.0, 2.0)
    grpo.write([row], updates, tmp_path, "title", 0.1)
    assert (tmp_path / "publishing.txt").read_text() == table(updates) + "\n"
    assert table(updates) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ({"Staging": 1.0, "Committing": 3.0, "Complete": 4.0}, (1.0, 2.0, 1.0)),
        ({"Staging": 1.0, "Complete": 4.0}, (1.0, 3.0, 0.0)),  # the commit was over before a look
        ({"Complete": 4.0}, (4.0, 0.0, 0.0)),
    ],
)
def test_phases_of_files_add_up_to_the_whole(
    marks: dict[str, float], expected: tuple[float, ...]
) -> None:
    clock = Clock(began=0.0, marks=marks)
    assert tuple(clock.phases(4.0).values()) == expected


def test_the_folder_of_the_example_holds_what_its_trainers_import() -> None:
    # The Job's script volume is made of this folder alone.
    assert Path(publishing.__file__).parent == train.EXAMPLE
