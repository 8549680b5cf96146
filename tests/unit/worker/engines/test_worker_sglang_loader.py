"""Weights of a sleeping rank of SGLang, without SGLang: a model, and a group of this process alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rollout_worker.engines.sglang.child_process import loader
from rollout_worker.engines.sglang.settings import SPILL_FOLDER_VARIABLE


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """What the functions see of a scheduler; its folder is `spill`."""
    (tmp_path / "spill").mkdir()
    monkeypatch.setenv(SPILL_FOLDER_VARIABLE, str(tmp_path / "spill"))
    meeting = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    # As in latent attention: plain tensors made of a parameter, one of them transposed, and a tied one.
    model[0].w_kc = torch.arange(12.0).reshape(3, 4).t()
    model[1].w_vc, model[1].tied = torch.arange(5.0), model[1].weight
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    found = SimpleNamespace(tp_worker=runner, tp_cpu_group=torch.distributed.group.WORLD)
    yield found
    loader.drop_spilled_weights(found)
    torch.distributed.destroy_process_group()


def values(scheduler: SimpleNamespace) -> list[torch.Tensor]:
    model = scheduler.tp_worker.model_runner.model
    return [*(each.detach() for each in model.parameters()), model[0].w_kc, model[1].w_vc]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_all_that_the_model_computes_with_comes_back(
    scheduler: SimpleNamespace, tmp_path: Path
) -> None:
    before = [each.clone() for each in values(scheduler)]
    files = open_files()
    for _ in range(2):  # the second one takes the first one's place
        loader.spill_weights(scheduler)
    assert open_files() == files + 1
    assert not list((tmp_path / "spill").iterdir()), "the file has no name"
    for each in values(scheduler):
        each.zero_()
    loader.restore_weights(scheduler)
    for was, now in zip(before, values(scheduler), strict=True):
        assert torch.equal(was, now)
    assert open_files() == files


def test_what_is_forgotten_takes_no_room(scheduler: SimpleNamespace) -> None:
    files = open_files()
    loader.spill_weights(scheduler)
    loader.drop_spilled_weights(scheduler)
    loader.drop_spilled_weights(scheduler)
    assert open_files() == files


def test_a_folder_without_room_is_named_and_nothing_stays(
    scheduler: SimpleNamespace, tmp_path: Path
) -> None:
    before = [each.clone() for each in values(scheduler)]
    files = open_files()
    (tmp_path / "spill").rmdir()
    with pytest.raises(OSError, match="spill': No such file or directory"):
        loader.spill_weights(scheduler)
    assert open_files() == files
    for was, now in zip(before, values(scheduler), strict=True):
        assert torch.equal(was, now)


def fails_elsewhere(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Let another rank say that it failed so."""

    def gather(told: list[str], own: str, **_: object) -> None:
        told[:] = [own, why]

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)


def test_a_rank_that_can_not_read_its_file_fails_the_first_one_too(
    scheduler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang goes by what its first rank says: the other's model would serve with what is there."""
    loader.spill_weights(scheduler)
    with monkeypatch.context() as other:
        fails_elsewhere(other, "'/spill': Input/output error")
        with pytest.raises(OSError, match="Input/output error"):
            loader.restore_weights(scheduler)


def test_a_file_that_ends_early_is_told(scheduler: SimpleNamespace) -> None:
    loader.spill_weights(scheduler)
    os.truncate(loader._spill_files[0]._file.fileno(), 8)
    with pytest.raises(OSError, match="spill': it ends early"):
        loader.restore_weights(scheduler)


def test_whatever_fails_in_a_rank_is_told_to_all(
    scheduler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that only raised would leave the others waiting for it."""
    files = open_files()
    monkeypatch.setattr(loader, "_model_chunks", lambda _: 1 / 0)
    with pytest.raises(OSError, match="spill': division by zero"):
        loader.spill_weights(scheduler)
    assert open_files() == files
