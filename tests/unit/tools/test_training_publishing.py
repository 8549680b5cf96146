"""The trainer of examples/grpo publishes by memory, or by files where it is told to."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import publishing
from demo import train
from publishing import Publisher, with_transport
from rollout_client import Published, WeightsId
from rollout_client.steering.steering_protocol import PublishReport, PushedTo


class Pool:
    """Publishes at once, and says so."""

    def acquire(self) -> int:
        return 3

    def publish_weights(self, version: int, *, tensors: Any, transport: str) -> Published:
        replicas = {"a": PushedTo("tcp", 0.05), "b": PushedTo("shm", 0.05)}
        return self.done(version, PublishReport(1 << 20, {}, replicas))

    def save_and_publish(
        self, model: Any, version: int, folder: Path, *, mounted_at: Path, keep: int
    ) -> Published:
        return self.done(version, None)

    def done(self, version: int, report: PublishReport | None) -> Published:
        return Published(WeightsId(epoch=3, version=version), None, 2, 0.2, None, "", report)


def transport_of(*flags: str) -> Any:
    return with_transport(argparse.ArgumentParser()).parse_args(flags).transport


@pytest.mark.parametrize(
    ("flags", "way"), [((), "memory (shm+tcp)"), (("--transport=files",), "files")]
)
def test_every_version_goes_by_memory_unless_files_are_asked_for(
    flags: tuple[str, ...], way: str
) -> None:
    remembered = list[Any]()
    policy = SimpleNamespace(
        model=None, remember=remembered.append, published=lambda: {"tensors": None}
    )
    made = Publisher(Pool(), policy, Path("w"), Path("m"), transport_of(*flags))  # type: ignore[arg-type]
    for version in range(1, 6):
        made.publish()
        assert (made.way, made.committed) == (way, (3, version))
    assert remembered == [(3, version) for version in range(1, 6)]


def test_a_job_that_pushes_has_a_token_for_the_workers() -> None:
    for name in ("job.yaml", "tools-job.yaml"):
        job = yaml.safe_load((train.EXAMPLE / name).read_text())
        pod = job["spec"]["template"]["spec"]
        [container] = pod["containers"]
        own = [flag for flag in container["args"] if flag.startswith("--transport")]
        mounted = {each["mountPath"] for each in container["volumeMounts"]}
        pushes = transport_of(*own) != "files"
        assert ("/var/run/secrets/rollout.dev" in mounted) == pushes, name


def test_the_folder_of_the_example_holds_what_its_trainers_import() -> None:
    # The Job's script volume is made of this folder alone.
    assert Path(publishing.__file__).parent == train.EXAMPLE
