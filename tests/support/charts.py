"""Renders the chart with the cache's helm."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import yaml

from localkube import processes
from localkube.home import binaries

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "rollout-operator"
VALUES = ROOT / "tests" / "chart" / "values"
RELEASE, NAMESPACE = "rollout", "rollout-system"

Document = dict[str, Any]


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run helm without a cluster and return what it said, also when it failed."""
    command = [str(binaries() / "helm"), *map(str, arguments)]
    env = {**os.environ, **processes.SHORT_LIVED}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@functools.cache
def template(*arguments: str | Path) -> str:
    """Return the rendered chart as text; the chart does not change while tests run."""
    done = helm("template", RELEASE, CHART, "--namespace", NAMESPACE, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(*arguments: str | Path) -> list[Document]:
    """Return the rendered documents, to be changed at will."""
    return copy.deepcopy(_parsed(template(*arguments)))


@functools.cache
def _parsed(text: str) -> list[Document]:
    # In C: the CRD alone takes the loader in Python 0.2 s.
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def case(name: str) -> list[Document]:
    """Return the documents for one of the value files of the tests."""
    return rendered("--values", VALUES / f"{name}.yaml")


def one(documents: list[Document], kind: str, name: str | None = None) -> Document:
    """Return the only document of a kind (and name)."""
    found = [d for d in documents if d["kind"] == kind and name in (None, d["metadata"]["name"])]
    assert len(found) == 1, f"{len(found)} {kind} {name or ''}"
    return found[0]


def every(documents: list[Document], kind: str) -> list[Document]:
    return [d for d in documents if d["kind"] == kind]
