"""Pushed weights on every engine: the same bytes make the same tokens, whichever way they came."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts import Served
from pushing import Version, trainer
from reference import Reference
from rollout_worker.schemas import StagedWeights
from rollout_worker.sources.files import open_source
from rollout_worker.transfer.frames import Kind
from workers import PROMPT

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


@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_pushed_weights_serve_as_files_do(
    worker: Served, reference: dict[int, Reference], way: str
) -> None:
    given = version_of(worker.models.weights(2))
    epoch, version = worker.next_version()
    answer = worker.post(
        "weights/stage", epoch=epoch, version=version, source={"pushed": {}}, deadline_seconds=120
    )
    assert answer.status_code == 202, answer.text
    transfer = StagedWeights.model_validate(answer.json()).transfer
    assert transfer is not None
    with trainer(transfer, given, way) as end:
        end.connection.keep_alive()
        end.whole(transfer)
        told = end.answer()
        assert told.kind is Kind.STAGED, told.head
    given.slot.close()
    done = worker.commit(epoch, version, in_flight="Abort")
    assert done["active"]["root_hash"] == given.root_hash
    [output] = worker.outputs(GREEDY)
    assert output["token_ids"] == reference[2].greedy(PROMPT, 8)
    assert worker.state()["weights"]["kept"]["root_hash"] == given.root_hash
    worker.load(1)
    assert worker.state()["weights"]["kept"] is None
    [output] = worker.outputs(GREEDY)
    assert output["token_ids"] == reference[1].greedy(PROMPT, 8)
