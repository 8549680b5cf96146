"""The recipe for machines without nodes of our own: its files, its commands and what the demo applies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo import scene
from demo.stage import DemoError

ROOT = Path(__file__).parents[3]
LOCAL = ROOT / "examples" / "local"
MINIMUM = (1, 32)


def section() -> str:
    """The recipe, as the README tells it."""
    text = (ROOT / "README.md").read_text()
    return text.partition("### On kind or k3d")[2].partition("\n## ")[0]


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((LOCAL / name).read_text())
    return found


def test_kind_makes_one_node_of_the_name_that_images_are_loaded_to() -> None:
    found = config("kind.yaml")
    assert set(found) == {"kind", "apiVersion", "name", "nodes"}
    assert (found["kind"], found["apiVersion"]) == ("Cluster", "kind.x-k8s.io/v1alpha4")
    assert found["nodes"] == [{"role": "control-plane"}]
    assert f"kind load docker-image --name {found['name']} " in section()


def test_k3d_makes_one_node_of_a_kubernetes_that_is_new_enough() -> None:
    found = config("k3d.yaml")
    assert set(found) == {"kind", "apiVersion", "metadata", "servers", "agents", "image", "options"}
    assert (found["kind"], found["apiVersion"]) == ("Simple", "k3d.io/v1alpha5")
    assert (found["servers"], found["agents"]) == (1, 0)
    version = re.search(r":v(\d+)\.(\d+)\.", found["image"])
    assert version
    assert (int(version[1]), int(version[2])) >= MINIMUM
    assert f"k3d image import --cluster {found['metadata']['name']} " in section()


def test_the_recipe_loads_what_it_builds_and_the_demo_uses_that() -> None:
    text = section()
    built = dict(re.findall(r"docker build --target (\S+)\s+-t (\S+)", text))
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.M))
    assert set(built) == {"operator", "worker-hf"} <= targets
    both = f"{built['operator']} {built['worker-hf']}"
    assert len(re.findall(rf"(?:docker-image|image import) .*{re.escape(both)}$", text, re.M)) == 2
    assert (
        f"CLUSTER=existing OPERATOR_IMAGE={built['operator']} WORKER_IMAGE={built['worker-hf']} make demo"
    ) in text
    for path in re.findall(r"--config (\S+)", text):
        assert (ROOT / path).is_file()


@pytest.mark.parametrize("word", ["PersistentVolumeClaim", "ConfigMap", "Job"])
def test_the_demo_asks_for_what_one_node_has(word: str) -> None:
    found = [each for each in scene.model_objects("worker:1") if each["kind"] == word]
    assert found
    for claim in found if word == "PersistentVolumeClaim" else []:
        assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
        assert "storageClassName" not in claim["spec"], "the cluster's default one"


@pytest.mark.parametrize("programs", [[], ["kubectl", "helm"]], ids=["no kubectl", "no images"])
def test_whoever_has_a_kubeconfig_is_told_how_to_get_the_demos_own_cluster(
    programs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in programs:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("OPERATOR_IMAGE", raising=False)
    with pytest.raises(DemoError, match="unset CLUSTER and KUBECONFIG"):
        scene.existing_scene()
