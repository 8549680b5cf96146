"""Pushed weights on every engine: the same bytes make the same tokens, whichever way they came."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

import pytest

from rollout_worker.sources.checkpoint_files import open_source
from tests.support.engine.contracts import Served, level_of, named
from tests.support.engine.reference import Reference
from tests.support.engine.workers import PROMPT
from tests.support.unit.pushing import Version
from tests.support.waiting import until_sync

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def version_of(folder: Path) -> Version:
    """The tensors of a checkpoint in a trainer's memory."""
    source = open_source(folder)
    found = {}
    for entry in source.entries:
        place = source.places[entry.name]
        with place.file.open("rb") as file:
            file.seek(place.offset)
            content = file.read(entry.spec.nbytes)
        found[entry.name] = (entry.spec.dtype, entry.spec.shape, content)
    return Version.of(found)


def mapping(worker: Served) -> list[int]:
    """The engine's processes that have a version's memory mapped."""
    found = []
    for process in worker.children():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if "/memfd:rollout-" in Path(f"/proc/{process.pid}/maps").read_text():
                found.append(process.pid)
    return found


def held_apart(worker: Served) -> bool:
    """Whether processes other than the worker's map what is staged: hf has none."""
    return not worker.kind.in_process


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_pushed_weights_serve_as_files_do(
    worker: Served, reference: dict[int, Reference], way: Literal["unix", "tcp"]
) -> None:
    given = version_of(worker.models.weights(2))
    identity = worker.push(given, "2", way=way)
    assert bool(mapping(worker)) == held_apart(worker), "the commit's pause maps it"
    given.slot.close()
    done = worker.commit(*identity, in_flight="Abort")
    assert done["active"]["root_hash"] == given.root_hash
    [output] = worker.outputs(GREEDY)
    assert output["token_ids"] == reference[2].greedy(PROMPT, 8)
    assert worker.state()["weights"]["kept"]["root_hash"] == given.root_hash
    until_sync(lambda: not mapping(worker), what="the engine to let go of what it has read")
    worker.load(1)
    assert worker.state()["weights"]["kept"] is None
    [output] = worker.outputs(GREEDY)
    assert output["token_ids"] == reference[1].greedy(PROMPT, 8)


@pytest.mark.parametrize("load", [True, False], ids=["with the old weights", "without"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_worker_that_sleeps_keeps_what_is_pushed_for_its_wake(
    worker: Served, reference: dict[int, Reference], level: int, load: bool
) -> None:
    level = level_of(worker, level)
    if not load:
        level_of(worker, 2)  # an engine without it can't wake without values, either
    worker.load(1)
    worker.post("sleep", level=level)
    given = version_of(worker.models.weights(2))
    epoch, version = worker.push(given, "2")
    given.slot.close()
    assert worker.state()["lifecycle"] == "Asleep"
    answer = worker.post("weights/commit", epoch=epoch, version=version)
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:rollout:problem:asleep")
    worker.post("wake", tags=["weights"], load=load)
    worker.commit(epoch, version, in_flight="Abort")
    assert worker.post("wake").json()["lifecycle"] == "Active"
    [output] = worker.outputs(GREEDY)
    assert output["token_ids"] == reference[2].greedy(PROMPT, 8)
    # What was pushed asleep is kept as any other version: sleep at level 2 comes back to it.
    worker.post("sleep", level=level)
    worker.post("wake")
    [output] = worker.outputs(GREEDY)
    assert output["token_ids"] == reference[2].greedy(PROMPT, 8)


def test_what_is_staged_is_held_until_it_is_given_up(worker: Served) -> None:
    """Files, too: mapped by the engine's processes before the commit, and not after the slot is gone."""
    epoch, version = worker.stage_next(2)
    assert bool(mapping(worker)) == held_apart(worker)
    answer = worker.post("weights/discard", epoch=epoch, version=version)
    assert answer.status_code == 200, answer.text
    until_sync(lambda: not mapping(worker), what="the engine to let go of what was given up")


def test_what_differs_serves_as_the_whole_does(
    worker: Served, reference: dict[int, Reference]
) -> None:
    one, two = (version_of(worker.models.weights(n)) for n in (1, 2))
    identity, old = worker.push(one, "1"), None
    for seed, new in ((1, one), (2, two), (1, one), (2, two)):
        if old is not None:
            # Memory of before is used again, first as a copy of the base, then by both deltas.
            identity = worker.push(new, str(seed), base=(*identity, old))
        done = worker.commit(*identity, in_flight="Abort")
        assert done["active"]["root_hash"] == new.root_hash
        [output] = worker.outputs(GREEDY)
        assert output["token_ids"] == reference[seed].greedy(PROMPT, 8)
        old = new
    for each in (one, two):
        each.slot.close()
    wrong = {**named(identity), "root_hash": "xxh3_128_tree:" + "0" * 32}
    source = {"pushed": {"base": wrong}}
    refused = worker.post("weights/stage", **named(worker.next_version()), source=source)
    assert refused.status_code == 409
    assert refused.json()["type"].endswith(":wrong-base")
