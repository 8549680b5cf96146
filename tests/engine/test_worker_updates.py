"""Stage, commit, discard, require on a real worker: order, content, in-flight policies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engine.reference import Reference
from tests.support.engine.shared import Lender, Shared
from tests.support.engine.tinymodels import TinyModels
from tests.support.engine.workers import PROMPT, in_process, slug
from tests.support.waiting import until_sync


@pytest.fixture
def v2(tiny_models: TinyModels) -> Path:
    return tiny_models.weights(2)


@pytest.fixture
def v3(tiny_models: TinyModels) -> Path:
    return tiny_models.weights(3)


def body(epoch: int, version: int, path: Path, **fields: Any) -> dict[str, Any]:
    return {"epoch": epoch, "version": version, "source": {"path": str(path)}, **fields}


def refused(answer: httpx.Response) -> str:
    assert answer.status_code == 409, answer.text
    return slug(answer)


def test_an_update_changes_the_output_and_says_so(
    worker: Shared, v2: Path, v3: Path, reference_2: Reference
) -> None:
    first = worker.sample()
    slot = worker.stage(worker.epoch, 1, v2, labels={"step": "10"})
    assert (slot["phase"], slot["bytes_done"]) == ("Staged", slot["bytes_total"])
    assert slot["bytes_total"] > 1e6
    assert worker.sample()["token_ids"] == first["token_ids"], "the old weights serve on"
    done = worker.commit(worker.epoch, 1, root_hash=slot["root_hash"])
    assert done["active"] == {
        "epoch": worker.epoch,
        "version": 1,
        "root_hash": slot["root_hash"],
        "labels": {"step": "10"},
    }
    assert (done["previous"]["epoch"], done["previous"]["version"]) == (worker.epoch, 0)
    assert (worker.commits, done["finished"], done["aborted"], done["kept"]) == (1, 0, 0, 0)
    second = worker.sample()
    assert second["token_ids"] != first["token_ids"]
    assert [(s["epoch"], s["version"]) for s in second["weights"]] == [(worker.epoch, 1)]
    assert second["token_ids"] == reference_2.greedy(PROMPT, 8)
    worker.update(worker.epoch, 2, v3)
    assert worker.commits == 2
    # Going back: a higher epoch with the older source.
    worker.post("weights/stage", epoch=worker.epoch + 1, version=0, source={"checkpoint": {}})
    until_sync(lambda: worker.state()["weights"]["staged"]["phase"] == "Staged", what="staged")
    worker.commit(worker.epoch + 1, 0)
    assert worker.sample()["token_ids"] == first["token_ids"]


def test_stage_is_idempotent_and_bound_to_its_content(
    worker: Shared, v2: Path, v3: Path, tmp_path: Path
) -> None:
    slot = worker.stage(worker.epoch, 1, v2)
    assert worker.post("weights/stage", **body(worker.epoch, 1, v2)).json() == slot
    same = body(worker.epoch, 1, v2, root_hash=slot["root_hash"])
    assert worker.post("weights/stage", **same).json() == slot
    copy = body(
        worker.epoch, 1, shutil.copytree(v2, tmp_path / "copy"), root_hash=slot["root_hash"]
    )
    assert worker.post("weights/stage", **copy).json() == slot, "what it is counts, not where"
    for other in (body(worker.epoch, 1, v3), body(worker.epoch, 1, v2, root_hash="xxh3_128:0")):
        assert refused(worker.post("weights/stage", **other)) == "content-mismatch"
    assert refused(worker.post("weights/commit", epoch=worker.epoch, version=1, root_hash="x")) == (
        "content-mismatch"
    )
    worker.commit(worker.epoch, 1)
    # Once active it stays bound.
    for again in (same, copy):
        answer = worker.post("weights/stage", **again)
        assert answer.status_code == 202
        assert answer.json()["phase"] == "Staged"
    assert refused(worker.post("weights/stage", **body(worker.epoch, 1, v3))) == "content-mismatch"
    assert refused(worker.post("weights/commit", epoch=worker.epoch, version=1, root_hash="x")) == (
        "content-mismatch"
    )


def test_one_slot_higher_supersedes_lower_is_refused(worker: Shared, v2: Path, v3: Path) -> None:
    worker.stage(worker.epoch, 5, v2)
    assert refused(worker.post("weights/stage", **body(worker.epoch, 4, v3))) == "version-regressed"
    assert refused(worker.post("weights/stage", **body(worker.epoch - 1, 9, v3))) == "stale-epoch"
    assert worker.stage(worker.epoch, 6, v3)["phase"] == "Staged"
    assert refused(worker.post("weights/commit", epoch=worker.epoch, version=5)) == "not-staged"
    worker.commit(worker.epoch, 6)
    assert refused(worker.post("weights/stage", **body(worker.epoch, 5, v2))) == "version-regressed"
    assert (
        refused(worker.post("weights/commit", epoch=worker.epoch, version=5)) == "version-regressed"
    )
    assert (
        refused(worker.post("weights/commit", epoch=worker.epoch - 1, version=7)) == "stale-epoch"
    )
    assert refused(worker.post("weights/commit", epoch=worker.epoch, version=7)) == "not-staged"


def test_a_commit_repeated_answers_the_same(worker: Shared, v2: Path) -> None:
    done = worker.update(worker.epoch, 1, v2)
    assert worker.commit(worker.epoch, 1) == done
    assert worker.commit(worker.epoch, 1, in_flight="Abort") == done


def test_concurrent_commits_flip_once(worker: Shared, v2: Path) -> None:
    worker.stage(worker.epoch, 1, v2)
    calls = [worker.in_background(lambda: worker.commit(worker.epoch, 1)) for _ in range(6)]
    answers = [call.result(30) for call in calls]
    assert all(answer == answers[0] for answer in answers)
    assert worker.commits == 1


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("gone", "no"),
        ("empty", "safetensors"),
        ("cut", "model.safetensors"),
        ("hash", "content-mismatch"),
    ],
)
def test_a_failed_stage_names_the_reason_and_may_be_repeated(
    worker: Shared, v2: Path, tmp_path: Path, damage: str, said: str
) -> None:
    path = tmp_path / "v"
    fields: dict[str, Any] = {}
    if damage == "empty":
        path.mkdir()
    elif damage in ("cut", "hash"):
        shutil.copytree(v2, path)
    if damage == "cut":
        data = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    if damage == "hash":
        fields["root_hash"] = "xxh3_128:00"
    before = worker.sample()
    slot = worker.stage(worker.epoch, 1, path, **fields)
    assert slot["phase"] == "Failed"
    assert said in slot["error"]
    assert refused(worker.post("weights/commit", epoch=worker.epoch, version=1)) == "not-staged"
    assert worker.sample() == before
    worker.update(worker.epoch, 1, v2)
    assert worker.commits == 1


def test_a_stage_has_a_deadline(worker: Shared, v2: Path) -> None:
    slot = worker.stage(worker.epoch, 1, v2, deadline_seconds=1e-6)
    assert slot["phase"] == "Failed"
    assert "deadline_seconds" in slot["error"]


def test_discard_drops_its_own_identity_only(worker: Shared, v2: Path) -> None:
    worker.stage(worker.epoch, 2, v2)
    for epoch, version in ((worker.epoch, 1), (worker.epoch + 1, 2)):
        answer = worker.post("weights/discard", epoch=epoch, version=version)
        assert answer.json() == {"outcome": "unchanged"}
    assert worker.post("weights/discard", epoch=worker.epoch, version=2).json() == {
        "outcome": "discarded"
    }
    assert worker.post("weights/discard", epoch=worker.epoch, version=2).json() == {
        "outcome": "unchanged"
    }
    assert worker.state()["weights"]["staged"] is None
    assert refused(worker.post("weights/commit", epoch=worker.epoch, version=2)) == "not-staged"
    assert worker.stage(worker.epoch, 1, v2)["phase"] == "Staged", "lower than what was discarded"


def test_the_floor_rises_and_fences(worker: Shared, v2: Path) -> None:
    epoch = worker.epoch
    answer = worker.post("require", epoch=epoch, min_version=0)
    assert answer.json()["required"] == {"epoch": epoch, "version": 0}
    assert worker.ready()
    assert worker.post("require", epoch=epoch, min_version=2).status_code == 200
    answer = worker.generate()
    assert (answer.status_code, slug(answer)) == (503, "fenced")
    assert answer.json()["required"] == {"epoch": epoch, "version": 2}
    assert not worker.ready()
    assert refused(worker.post("require", epoch=epoch, min_version=1)) == "version-regressed"
    assert refused(worker.post("require", epoch=epoch - 1, min_version=9)) == "stale-epoch"
    assert worker.post("require", epoch=epoch, min_version=2).status_code == 200
    worker.update(epoch, 1, v2)
    assert not worker.ready()
    worker.update(epoch, 2, v2)
    assert worker.ready()


def test_an_epoch_without_a_version_shuts_out_the_dead_trainer(worker: Shared, v2: Path) -> None:
    worker.stage(worker.epoch, 1, v2)
    later = worker.epoch + 1
    assert worker.post("require", epoch=later).json()["fence_epoch"] == later
    assert worker.ready(), "the old weights go on serving"
    assert refused(worker.post("weights/commit", epoch=worker.epoch, version=1)) == "stale-epoch"
    assert refused(worker.post("weights/stage", **body(worker.epoch, 9, v2))) == "stale-epoch"
    assert refused(worker.post("require", epoch=worker.epoch)) == "stale-epoch"
    assert worker.update(later, 0, v2)["active"]["epoch"] == later


def test_in_a_pool_a_worker_starts_fenced(tiny_models: TinyModels, v2: Path) -> None:
    roots = f"{v2.parent}"
    flags = ("--pool", "p", "--namespace", "n", "--weights-roots", roots)
    with in_process(tiny_models.model(1), *flags) as worker:
        answer = worker.generate()
        assert (answer.status_code, slug(answer)) == (503, "fenced")
        assert slug(worker.data.get("/ready")) == "fenced"
        worker.post("require", epoch=0)
        assert not worker.ready(), "an epoch alone lifts no fence"
        worker.post("require", epoch=0, min_version=0)
        assert worker.ready()
        assert worker.update(1, 1, v2.name)["active"]["version"] == 1
        outside = worker.post("weights/stage", **body(1, 2, Path("/etc")))
        assert (outside.status_code, slug(outside)) == (422, "invalid-request")
        assert outside.json()["errors"][0]["field"] == "source.path"


# In-flight policies.


def finished(answer: Future[httpx.Response]) -> dict[str, Any]:
    response = answer.result(60)
    assert response.status_code == 200, response.text
    return dict(response.json()["outputs"][0])


def made_by(output: dict[str, Any]) -> list[tuple[int, bool]]:
    """Versions and staleness of the spans, which must cover the output."""
    spans = output["weights"]
    assert [s["start"] for s in spans] == [0, *[s["end"] for s in spans]][: len(spans)]
    assert not spans or spans[-1]["end"] == len(output["token_ids"])
    assert len(output["logprobs"]) == len(output["token_ids"])
    return [(s["version"], s["stale_kv"]) for s in spans]


@pytest.mark.parametrize(
    ("policy", "spans", "counts"),
    [
        ({"in_flight": "Drain", "deadline_seconds": 60}, [(0, False)], (1, 0, 0)),
        ({"in_flight": "Keep"}, [(0, False), (1, True)], (0, 0, 1)),
        ({"in_flight": "Recompute"}, [(0, False), (1, False)], (0, 0, 1)),
    ],
    ids=["drain", "keep", "recompute"],
)
def test_a_running_request_ends_by_itself(
    worker: Shared,
    v2: Path,
    policy: dict[str, Any],
    spans: list[tuple[int, bool]],
    counts: tuple[int, int, int],
) -> None:
    worker.stage(worker.epoch, 1, v2)
    running = worker.long(sampling={"max_tokens": 120, "ignore_eos": True})
    done = worker.commit(worker.epoch, 1, **policy)
    output = finished(running)
    assert (output["stop_reason"], len(output["token_ids"])) == ("length", 120)
    assert made_by(output) == spans
    assert (done["finished"], done["aborted"], done["kept"]) == counts
    assert 0 <= done["pause_seconds"] < 1


@pytest.mark.parametrize(
    "policy",
    [{"in_flight": "Abort"}, {"in_flight": "Drain", "deadline_seconds": 0.1}],
    ids=["abort", "drain past its deadline"],
)
def test_a_running_request_is_aborted(worker: Shared, v2: Path, policy: dict[str, Any]) -> None:
    worker.stage(worker.epoch, 1, v2)
    running = worker.long()
    done = worker.commit(worker.epoch, 1, **policy)
    output = finished(running)
    assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "weights")
    assert made_by(output) == [(0, False)]
    assert (done["finished"], done["aborted"], done["kept"]) == (0, 1, 0)


def test_a_drain_past_its_deadline_may_keep(worker: Shared, v2: Path) -> None:
    worker.stage(worker.epoch, 1, v2)
    running = worker.long(sampling={"max_tokens": 150, "ignore_eos": True})
    done = worker.commit(
        worker.epoch, 1, in_flight="Drain", deadline_seconds=0.1, on_deadline="Keep"
    )
    assert done["kept"] == 1
    assert made_by(finished(running)) == [(0, False), (1, True)]


def test_a_policy_that_the_engine_lacks_is_refused_at_the_deadline_too(
    tiny_models: TinyModels, v2: Path
) -> None:
    with in_process(tiny_models.model(1)) as worker:
        engine, _ = worker.worker.runtime.loaded_engine()
        less = {"in_flight": ("Drain", "Abort", "Recompute")}
        engine.capabilities = engine.capabilities.model_copy(update=less)
        worker.stage(1, 1, v2)
        for policy, field in (
            ("Keep", "in_flight"),
            ("Pin", "in_flight"),
            ("Drain", "on_deadline"),
        ):
            answer = worker.post(
                "weights/commit", epoch=1, version=1, in_flight=policy, on_deadline="Keep"
            )
            assert (answer.status_code, slug(answer)) == (422, "unsupported")
            assert answer.json()["errors"][0]["field"] == field
        # Nothing waits for a deadline here, so nothing is asked of the engine.
        done = worker.commit(1, 1, in_flight="Recompute", on_deadline="Keep")
        assert done["active"]["version"] == 1


@pytest.mark.parametrize("policy", ["Keep", "Recompute"])
def test_an_exact_version_never_spans(worker: Shared, v2: Path, policy: str) -> None:
    worker.stage(worker.epoch, 1, v2)
    exact = worker.long("exact", exact_version=0)
    free = worker.long("free", sampling={"max_tokens": 150, "ignore_eos": True})
    done = worker.commit(worker.epoch, 1, in_flight=policy)
    output = finished(exact)
    assert (output["stop_reason"], output["abort_reason"]) == ("aborted", "weights")
    assert made_by(output) == [(0, False)]
    assert (done["aborted"], done["kept"]) == (1, 1)
    assert len(made_by(finished(free))) == 2


@pytest.fixture(scope="module")
def narrow_lender(tiny_models: TinyModels) -> Iterator[Lender]:
    """Lends a worker that runs one output at a time."""
    lender = Lender(tiny_models.model(1), "--engine-arg=--max-batch-size", "--engine-arg=1")
    yield lender
    lender.close()


@pytest.mark.parametrize("policy", ["Drain", "Abort", "Keep", "Recompute", "Pin"])
def test_who_waits_runs_on_the_new_weights(narrow_lender: Lender, v2: Path, policy: str) -> None:
    worker = narrow_lender.lend()
    worker.stage(worker.epoch, 1, v2)
    running = worker.long(sampling={"max_tokens": 120, "ignore_eos": True})
    waiting = worker.in_background(lambda: worker.sample(5))
    until_sync(lambda: worker.state()["queued"] == 1, what="the second to wait")
    worker.commit(worker.epoch, 1, in_flight=policy, deadline_seconds=60)
    assert made_by(waiting.result(60)) == [(1, False)]
    assert made_by(finished(running))[0] == (0, False)


@pytest.mark.parametrize("policy", ["Drain", "Abort", "Keep", "Recompute", "Pin"])
def test_commits_under_load_label_every_token(
    worker: Shared, v2: Path, v3: Path, policy: str
) -> None:
    """Many clients, commits in between: nothing lost, every span in order, greedy output right."""
    stop = False

    def client(number: int) -> list[dict[str, Any]]:
        outputs = []
        while not stop:
            sampling = {"max_tokens": 8 + number, "ignore_eos": True, "temperature": 0}
            outputs.append(worker.generate(sampling=sampling).json()["outputs"][0])
        return outputs

    alone = {0: worker.sample(16)["token_ids"]}
    clients = [worker.in_background(partial(client, n)) for n in range(6)]
    for version, path in ((1, v2), (2, v3), (3, v2), (4, v3)):
        done = worker.update(worker.epoch, version, path, in_flight=policy, deadline_seconds=20)
        assert done["active"]["version"] == version
        assert done["pause_seconds"] < 2
        alone[version] = worker.sample(16)["token_ids"]
    stop = True
    outputs = [output for each in clients for output in each.result(60)]
    assert len(outputs) >= 6
    mixed = 0
    for output in outputs:
        versions = [version for version, _ in made_by(output)]
        assert versions == sorted(versions)
        if output["stop_reason"] == "aborted":
            assert (policy, output["abort_reason"]) == ("Abort", "weights")
        if len(set(versions)) == 1:
            assert output["token_ids"] == alone[versions[0]][: len(output["token_ids"])]
        mixed += len(set(versions)) > 1
    assert mixed == 0 or policy in ("Keep", "Recompute")
