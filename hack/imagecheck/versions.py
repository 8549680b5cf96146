"""Whether the packages of an image agree: its requirements, what is installed, and the docs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from localkube.home import REPOSITORY

ENGINES = ("hf", "vllm", "sglang")
"""Of the complete images, each with its requirements; columns of the table in docs/engine-limits.md."""

ROWS = {
    "torch": "torch",
    "transformers": "transformers",
    "Triton": "triton",
    "CUDA": "cuda-toolkit",
    "nvcc": "nvidia-cuda-nvcc",
    "cuda-python": "cuda-python",
    "cuda-bindings": "cuda-bindings",
    "cuDNN": "nvidia-cudnn-cu13",
    "NCCL": "nvidia-nccl-cu13",
    "FlashInfer": "flashinfer-python",
    "SGLang's kernels": "sglang-kernel",
    "memory saver": "torch-memory-saver",
}
"""Rows of that table, and the packages whose versions they show."""

TOOLKIT = (
    "nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-cupti", "nvidia-cuda-nvcc", "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime", "nvidia-nvtx", "nvidia-nvvm",
)  # fmt: skip
"""Compilers and what they compile against; nvJitLink works with every release of its major."""

PINNED = "requirements/gpu-constraints.txt"


def pins(requirements: str) -> dict[str, str]:
    """Return version by package of a file of requirements."""
    return dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)==([^\s;\\]+)", requirements, re.M))


def pins_of(image: str) -> dict[str, str]:
    return pins((REPOSITORY / "requirements" / f"{image}.txt").read_text())


def disagreements(found: Mapping[str, str]) -> list[str]:
    """Return what can't work together among versions by package, one sentence each."""
    if "torch" not in found:
        return []
    if (release := _release(found.get("cuda-toolkit", ""))) is None:
        return ["no cuda-toolkit: torch is a build without CUDA; install the build from the index"]
    problems = [
        f"{name} {found[name]} is of another CUDA than torch's {release}: "
        f"pin {name}=={release}.* in {PINNED}"
        for name in TOOLKIT
        if name in found and _release(found[name]) != release
    ]
    python, bindings = found.get("cuda-python"), found.get("cuda-bindings")
    if python and python != bindings:
        problems.append(
            f"cuda-python {python} next to cuda-bindings {bindings}: both bring cuda.bindings; "
            f"pin one version in {PINNED}"
        )
    return problems


def differences(wanted: Mapping[str, str], installed: Mapping[str, str]) -> list[str]:
    """Return where an image holds other versions than its requirements."""
    return [
        f"{name} {installed.get(name, 'is missing')}, requirements say {version}: build the image again"
        for name, version in wanted.items()
        if installed.get(name, "").partition("+")[0] != version.partition("+")[0]
    ]


def table(images: Sequence[str] = ENGINES) -> list[str]:
    """Return the rows that docs/engine-limits.md has to hold."""
    columns = [pins_of(image) for image in images]
    return [
        f"| {label} | {' | '.join(column.get(name, '-') for column in columns)} |"
        for label, name in ROWS.items()
    ]


def stale_rows(document: Path, rows: Sequence[str]) -> list[str]:
    lines = {re.sub(r"\s+", " ", line.strip()) for line in document.read_text().splitlines()}
    return [
        f"{document.name} has no row `{row}`: correct its table of versions"
        for row in rows
        if re.sub(r"\s+", " ", row) not in lines
    ]


def _release(version: str) -> str | None:
    """Return major and minor, as CUDA's releases are called."""
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else None
