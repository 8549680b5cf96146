"""Which paths of a stage request are allowed, and what may lie below them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from rollout_common.wire.problems import ProblemError
from rollout_worker.schemas import Checkpoint, WeightsSource
from rollout_worker.settings import WorkerSettings, add_flags, parse_settings
from rollout_worker.sources.tensor_filling import locate_source, resolve_source


def settings(model: Path, *roots: Path) -> WorkerSettings:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    arguments = ["--model", str(model), "--auth", "none", "--control-host", "127.0.0.1"]
    if roots:
        arguments += ["--weights-roots", ":".join(map(str, roots))]
    return parse_settings(parser.parse_args(arguments), {})


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path, Path]:
    folders = tuple(tmp_path / name for name in ("model", "first", "last"))
    for folder in folders:
        (folder / "v1").mkdir(parents=True)
    return folders[0], folders[1], folders[2]


def test_paths_below_a_root_or_the_model(roots: tuple[Path, Path, Path]) -> None:
    model, first, last = roots
    for path in (model, model / "v1", first / "v1", last / "v1", last / "not-there-yet"):
        found = resolve_source(WeightsSource(path=str(path)), settings(model, first, last))
        assert found.path == str(path)


def test_relative_paths_lie_below_the_last_root(roots: tuple[Path, Path, Path]) -> None:
    model, first, last = roots
    assert resolve_source(WeightsSource(path="v1"), settings(model, first, last)).path == str(
        last / "v1"
    )


def test_no_way_out(roots: tuple[Path, Path, Path]) -> None:
    model, first, last = roots
    (last / "link").symlink_to("/etc")
    for path in ("/etc", "../../etc", "link", "link/passwd", f"{last}-twin", str(last.parent)):
        with pytest.raises(ProblemError) as refused:
            resolve_source(WeightsSource(path=path), settings(model, model, first, last))
        body = refused.value.problem.model_dump()
        assert body["status"] == 422
        assert body["errors"][0]["field"] == "source.path"
        assert body["detail"].endswith(f"below one of {model}, {first}, {last}"), "each root once"


def test_alone_any_absolute_path_goes(roots: tuple[Path, Path, Path], tmp_path: Path) -> None:
    assert resolve_source(WeightsSource(path=str(tmp_path)), settings(roots[0])).path == str(
        tmp_path
    )
    with pytest.raises(ProblemError, match="absolute path"):
        resolve_source(WeightsSource(path="v1"), settings(roots[0]))
    with pytest.raises(ProblemError, match="NUL"):
        resolve_source(WeightsSource(path="/v\0"), settings(roots[0]))


def test_the_checkpoint_needs_no_path(roots: tuple[Path, Path, Path]) -> None:
    source = WeightsSource(checkpoint=Checkpoint())
    assert resolve_source(source, settings(roots[0])) is source


def test_a_version_may_take_its_files_from_the_model_and_the_roots(
    roots: tuple[Path, Path, Path],
) -> None:
    model, first, last = roots
    found = resolve_source(WeightsSource(path="v1"), settings(model, first, last))
    assert locate_source(found, settings(model, first, last), model) == (last / "v1", roots)
    assert locate_source(found, settings(model), model) == (last / "v1", ())


def test_the_checkpoint_is_the_models_folder_wherever_its_files_are(
    roots: tuple[Path, Path, Path],
) -> None:
    """That of a model of the hub holds links to a cache."""
    source = WeightsSource(checkpoint=Checkpoint())
    assert locate_source(source, settings(*roots), roots[0] / "v1") == (roots[0] / "v1", ())
