"""The example of a mixture of experts on 16 GPUs: what the operator makes of it, for both engines."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_operator.api.spec import parse_spec
from rollout_operator.config import EngineDefaults
from rollout_operator.core.pods.builder import PodBuilder
from rollout_worker.engines.sglang import settings as sglang

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "moe.yaml"


def document(engine: str) -> dict[str, Any]:
    """The example, changed as its comment says for another engine than its own."""
    found: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    if engine != found["spec"]["engine"]["type"]:
        kind, args = re.findall(rf"`type: ({engine})` and `args: (\[.*?\])`", EXAMPLE.read_text())[
            0
        ]
        found = copy.deepcopy(found)
        found["spec"]["engine"] |= {"type": kind, "args": yaml.safe_load(args)}
    return found


def containers(engine: str) -> list[dict[str, Any]]:
    """The worker's container of each pod of one replica."""
    spec = parse_spec(document(engine))
    base = EngineDefaults.model_validate({"image": "worker:1"})
    builder = PodBuilder("moe", "rl", "uid", "", spec, base)
    pods = [builder.build_pod(0, rank, 0) for rank in range(spec.parallelism.nodes)]
    return [pod["spec"]["containers"][0] for pod in pods]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_replica_is_a_gang_of_two_pods_with_eight_gpus_each(engine: str) -> None:
    found = containers(engine)
    assert len(found) == 2
    for rank, container in enumerate(found):
        assert container["resources"]["limits"]["nvidia.com/gpu"] in (8, "8")
        env = {each["name"]: each.get("value") for each in container["env"]}
        assert (env["ROLLOUT_NODES"], env["ROLLOUT_RANK"]) == ("2", str(rank))
        assert env["ROLLOUT_TENSOR"] == "16"


def test_sglang_spreads_the_experts_over_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in containers("sglang")[0]["env"]:
        if "value" in each:
            monkeypatch.setenv(each["name"], each["value"])
    given = sglang.parse_flags(document("sglang")["spec"]["engine"]["args"])
    assert given.flags == ("--tp-size", "16", "--ep-size=16")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_page_about_gpus_tells_the_same_flags(engine: str) -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    (flag,) = document(engine)["spec"]["engine"]["args"]
    row = next(line for line in page.splitlines() if line.startswith("| experts over all GPUs"))
    assert f"`{flag}`" in row
