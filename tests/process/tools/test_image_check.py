"""What hack/check_image.py makes of findings, and what it holds against the requirements; no image."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import imports as import_probe
from imagecheck import checks, versions
from imagecheck.box import Ended
from imagecheck.checks import Failed, engine_of, findings, right_engine

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("image", versions.ENGINES)
def test_the_packages_of_each_image_agree(image: str) -> None:
    assert versions.disagreements(versions.pins_of(image)) == []


@pytest.mark.parametrize(
    ("package", "version", "words"),
    [
        ("cuda-python", "12.6.2.post1", ("cuda-bindings", "both bring")),
        ("nvidia-cuda-nvcc", "13.5.37", ("nvidia-cuda-nvcc==13.0.*", "another CUDA")),
        ("nvidia-cuda-crt", "13.5.37", ("nvidia-cuda-crt==13.0.*", "another CUDA")),
        ("nvidia-cuda-runtime", "12.8.90", ("nvidia-cuda-runtime==13.0.*", "another CUDA")),
    ],
)
@pytest.mark.parametrize("image", ["vllm", "sglang"])
def test_a_doctored_pair_of_versions_is_noticed(
    image: str, package: str, version: str, words: tuple[str, ...]
) -> None:
    found = versions.pins_of(image)
    assert package in found
    (problem,) = versions.disagreements({**found, package: version})
    assert all(word in problem for word in (package, version, versions.PINNED, *words))


def test_a_torch_without_cuda_is_noticed_and_packages_without_torch_need_none() -> None:
    found = versions.pins_of("hf")
    del found["cuda-toolkit"]
    (problem,) = versions.disagreements(found)
    assert "cuda-toolkit" in problem
    assert versions.disagreements(versions.pins_of("operator")) == []


def test_the_table_of_versions_in_the_docs_is_that_of_the_requirements() -> None:
    assert versions.stale_rows(ROOT / "docs/engine-limits.md", versions.table()) == []


def test_a_stale_row_of_that_table_is_named(tmp_path: Path) -> None:
    page = tmp_path / "engines.md"
    rows = versions.table()
    page.write_text("\n".join(rows[1:]).replace(rows[1], f" {rows[1]}  "))
    (problem,) = versions.stale_rows(page, rows)
    assert rows[0] in problem


def test_constraints_pin_what_must_be_of_one_cuda() -> None:
    """What some package asks for without a bound is pinned; torch's own packages bound the rest."""
    pinned = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / versions.PINNED).read_text(), re.M))
    assert pinned <= set(versions.TOOLKIT)
    assert "cuda-python>=13" in (ROOT / versions.PINNED).read_text()


def test_an_image_that_differs_from_its_requirements_is_noticed() -> None:
    wanted = {"torch": "2.13.0", "triton": "3.7.1"}
    assert versions.differences(wanted, {"torch": "2.13.0+cu130", "triton": "3.7.1"}) == []
    missing, other = versions.differences(wanted, {"triton": "3.8.0"})
    assert "torch is missing" in missing
    assert "triton 3.8.0, requirements say 3.7.1" in other


@pytest.mark.parametrize("name", ["hf", "vllm", "sglang", "vllm-cpu", "sglang-cpu", "worker"])
def test_requirements_tell_the_engine(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    wanted = {"vllm-cpu": "hf", "worker": ""}.get(name, name.removesuffix("-cpu"))
    assert engine_of(text) == wanted


def test_an_image_of_another_engine_is_noticed() -> None:
    """Each would pass its own checks: a target may have the wrong requirements."""
    for engine in versions.ENGINES:
        assert right_engine(engine, engine).problems == []
        assert right_engine(engine, None).problems == []
    assert right_engine("hf", "vllm").problems == [
        "it should hold vllm, it holds hf: its target in the Dockerfile has other requirements"
    ]
    assert "it holds none" in right_engine("", "sglang").problems[0]


JUDGED: list[tuple[Callable[[dict[str, Any]], list[str]], dict[str, Any], list[dict[str, Any]]]] = [
    (
        checks.place_problems,
        {"pid": 1, "user": [65532, 65532, []], "user_name": "rollout", "writable": ["/tmp", "/dev/shm"]},
        [
            {"pid": 7}, {"user": [0, 0, []]}, {"user_name": ""},
            {"writable": ["/", "/tmp", "/dev/shm"]}, {"writable": []},
        ],
    ),
    (
        checks.config_problems,
        {"User": "65532:65532", "Entrypoint": ["rollout-worker"]},
        [{"User": "root"}, {"User": ""}, {"Entrypoint": ["sh", "-c", "rollout-worker"]}],
    ),
    (
        checks.preload_problems,
        {"library": "x.so", "status": 0, "said": ""},
        [{"status": 127}, {"said": "ERROR: ld.so: object 'x.so' ... ignored."}],
    ),
    (
        checks.kernel_problems,
        {"target": "sm_90a", "cubin": 5000, "launcher": True},
        [{"target": "sm_80"}, {"cubin": 0}, {"launcher": False}],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("judged", "right", "wrongs"), JUDGED, ids=lambda each: getattr(each, "__name__", "")
)
def test_one_wrong_finding_is_one_problem(
    judged: Callable[[dict[str, Any]], list[str]],
    right: dict[str, Any],
    wrongs: list[dict[str, Any]],
) -> None:
    assert judged(right) == []
    for wrong in wrongs:
        assert len(judged({**right, **wrong})) == 1, wrong


def test_two_packages_with_one_file_are_noticed() -> None:
    (problem,) = checks.agreement_problems(
        {
            "requirements": "",
            "installed": {},
            "shared_files": [["cuda/__init__.py", "cuda-bindings", "cuda-python"]],
        }
    )
    assert "cuda-bindings and by cuda-python" in problem


def test_a_library_that_nobody_has_is_noticed_and_one_that_another_package_ships_is_not() -> None:
    shipped = ["libtorch.so", "libcudart.so.13"]
    missing = {"lib/a.so": ["libtorch.so", "libcudart.so.12"], "lib/b.so": ["libtorch.so"]}
    (problem,) = checks.library_problems({"shipped": shipped, "missing": missing})
    assert "libcudart.so.12, which lib/a.so needs, is missing" in problem


def test_plugins_for_fabrics_may_lack_the_libraries_of_their_fabric() -> None:
    missing = {"lib/nvidia/nvshmem/lib/nvshmem_transport_ucx.so.3": ["libucp.so.0"]}
    assert checks.library_problems({"shipped": [], "missing": missing}) == []


def test_nvcc_of_another_release_than_torch_is_noticed() -> None:
    said = "Cuda compilation tools, release 13.0, V13.0.88"
    assert checks.nvcc_problems(said, {"cuda-toolkit": "13.0.3.0"}) == []
    assert (
        "13.5"
        in checks.nvcc_problems(said.replace("13.0", "13.5"), {"cuda-toolkit": "13.0.3.0"})[0]
    )
    assert len(checks.nvcc_problems("sh: nvcc: not found", {"cuda-toolkit": "13.0.3.0"})) == 1


def test_a_probe_that_dies_is_a_failure_with_its_last_words() -> None:
    assert findings(Ended(0, 'warning\nfound: {"a": 1}\n')) == {"a": 1}
    with pytest.raises(Failed, match=r"exit status 127.*libcuda"):
        findings(Ended(127, "error while loading libcuda.so.1"))
    with pytest.raises(Failed, match="ran too long"):
        findings(Ended(None, ""))


def test_the_probe_sees_imports_inside_of_functions_and_relative_ones(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import a.b\nfrom . import c\nfrom ..d import e\ndef f():\n    from g import h\n"
    )
    assert set(import_probe.imported(file, "top.room")) == {
        ("a.b", ""), ("top.room", "c"), ("top.d", "e"), ("g", "h"),
    }  # fmt: skip


def test_the_probe_asks_for_what_an_adapter_imports_and_for_no_other_engine() -> None:
    for engine in versions.ENGINES:
        modules = {module.partition(".")[0] for module, _ in import_probe.of_worker(engine)}
        assert not modules & ({"vllm", "sglang"} - {engine})
        assert {"torch", "transformers", "fastapi", "rollout_worker"} <= modules
        assert engine == "hf" or engine in modules


def targets() -> dict[str, str]:
    """The Dockerfile's stages by name."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(
    ("target", "requirements"),
    [("worker", "worker"), *((f"worker-{name}", name) for name in versions.ENGINES)]
    + [(f"worker-{name}-cpu", f"{name}-cpu") for name in ("vllm", "sglang")],
)
def test_every_worker_is_a_target_that_ends_alike(target: str, requirements: str) -> None:
    stage = targets()[target]
    assert f"COPY requirements/{requirements}.txt /opt/rollout/requirements.txt" in stage
    assert (ROOT / "requirements" / f"{requirements}.txt").exists()
    assert f"USER {checks.USER}:{checks.USER}\n" in stage
    steps = [line for line in stage.splitlines() if line and not line.startswith("#")]
    assert steps[-1] == 'ENTRYPOINT ["rollout-worker"]'
