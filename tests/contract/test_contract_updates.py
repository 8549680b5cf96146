"""New weights under load: every in-flight policy, spans, exact versions, the prefix cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.engine.contracts import Output, Served, made_by, outputs_of, sound
from tests.support.engine.reference import Reference
from tests.support.engine.workers import PROMPT, slug

LOAD = 16
TOKENS = 320
"""So many that a commit meets them yet when this process has had to wait for a core."""
POLICIES = ("Drain", "Abort", "Keep", "Recompute", "Pin")
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def true_to(output: Output, judges: dict[int, Reference], prompt: list[int] = PROMPT) -> None:
    """Every fresh token has the logprob that the weights of its span give it (T = 1)."""
    for span in output["weights"]:
        if span["stale_kv"]:
            continue
        upto = output["token_ids"][: span["end"]]
        expected = judges[span["version"]].raw_logprobs(prompt, upto)[span["start"] :]
        got = output["logprobs"][span["start"] : span["end"]]
        assert got == pytest.approx(expected, abs=2e-4), span


def answers(responses: list[Any]) -> list[Output]:
    return [output for response in responses for output in outputs_of(response)]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_update_below_running_requests(
    worker: Served, reference: dict[int, Reference], policy: str
) -> None:
    old = worker.state()["weights"]["active"]["version"]
    epoch, new = worker.stage_next(2)
    if policy not in worker.able["in_flight"]:
        answer = worker.post("weights/commit", epoch=epoch, version=new, in_flight=policy)
        assert (answer.status_code, slug(answer)) == (422, "unsupported")
        assert answer.json()["errors"][0]["field"] == "in_flight"
        worker.post("weights/discard", epoch=epoch, version=new)
        return
    judges = {old: reference[1], new: reference[2]}
    # What is aborted costs nothing to be longer, and is sure to run yet when a busy machine commits late.
    tokens = 3 * TOKENS if policy == "Abort" else TOKENS
    running = worker.busy(LOAD, tokens)
    worker.makes(2 * LOAD)  # accepted is not begun: let a slow engine come to all of them
    done = worker.commit(epoch, new, in_flight=policy, deadline_seconds=60)
    [after] = worker.outputs(GREEDY)
    assert made_by(after) == [(new, False)]
    assert after["token_ids"] == reference[2].greedy(PROMPT, 8)
    outputs = answers(running())
    for output in outputs:
        true_to(output, judges)
        assert (output["abort_reason"] == "weights") is (output["stop_reason"] == "aborted")
        if output["stop_reason"] == "length":
            assert len(output["token_ids"]) == tokens
    # One that ran but had no token yet when it was aborted was made by nobody.
    begun = [o for o in outputs if o["token_ids"] or o["stop_reason"] != "aborted"]
    kinds = [made_by(output) for output in begun]
    spanning = {"Keep": [(old, False), (new, True)], "Recompute": [(old, False), (new, False)]}
    # Nor had one that went back to the queue: it is the new weights' from its first token on.
    allowed = [[(old, False)], [(new, False)]]
    allowed += [spanning[policy]] if policy in spanning else []
    assert all(kind in allowed for kind in kinds), kinds
    hit = {
        "Drain": done["finished"],
        "Abort": sum(output["stop_reason"] == "aborted" for output in outputs),
        "Pin": done["kept"],
    }.get(policy, sum(len(kind) == 2 for kind in kinds))
    assert hit >= LOAD // 2, f"only {hit} requests met the commit: {done}"
    counted = {"Drain": "finished", "Abort": "aborted"}.get(policy, "kept")
    assert done[counted] >= hit
    assert kinds.count([(new, False)]) <= LOAD - hit
    assert done["pause_seconds"] < 5


def test_a_drain_may_keep_what_still_runs_at_its_deadline(
    worker: Served, reference: dict[int, Reference]
) -> None:
    """So `Drain` needs more of an engine than `abort`, and is refused where `Keep` is."""
    old = worker.state()["weights"]["active"]["version"]
    epoch, new = worker.stage_next(2)
    drain = {"in_flight": "Drain", "deadline_seconds": 0.1, "on_deadline": "Keep"}
    if "Keep" not in worker.able["in_flight"]:
        answer = worker.post("weights/commit", epoch=epoch, version=new, **drain)
        assert (answer.status_code, slug(answer)) == (422, "unsupported")
        assert answer.json()["errors"][0]["field"] == "on_deadline"
        worker.post("weights/discard", epoch=epoch, version=new)
        return
    # As many as a quick engine does not make while the commit is on its way.
    running = worker.long("r", sampling={"max_tokens": 1000, "ignore_eos": True})
    worker.makes(20)
    assert worker.commit(epoch, new, **drain)["kept"] == 1
    [output] = answers([running.result(60)])
    assert made_by(output) == [(old, False), (new, True)]
    true_to(output, {old: reference[1]})


@pytest.mark.parametrize("policy", ["Keep", "Recompute", "Pin"])
def test_an_exact_version_never_spans_a_sleep(
    worker: Served, reference: dict[int, Reference], policy: str
) -> None:
    """Whether another version is committed before the memory goes or between the two wakes."""
    if policy not in worker.able["in_flight"] or not worker.able["sleep_levels"]:
        pytest.skip(f"{worker.kind} declares no {policy}, or no sleep")
    # The first runs until the commit, which a busy machine reaches late; pinned ones run to their end.
    sampling = {"max_tokens": 700 if policy == "Pin" else 1500, "ignore_eos": True}
    versions: list[tuple[int, int]] = []
    exact: list[Any] = []

    def begin(seed: int) -> None:
        active = worker.state()["weights"]["active"]
        versions.append((active["version"], seed))
        bounds = {"epoch": active["epoch"], "exact_version": active["version"]}
        name = f"exact{len(exact)}"
        exact.append(worker.long(name, sampling=sampling, **bounds))

    second = worker.stage_next(2)
    begin(1)
    worker.makes(5)
    worker.commit(*second, in_flight=policy)
    begin(2)
    worker.makes(5)
    slept = worker.post("sleep", mode="keep")
    assert slept.status_code == 200, slept.text
    worker.post("wake", tags=["weights"])
    worker.load(3, in_flight=policy)
    worker.post("wake")
    outputs = answers([answer.result(60) for answer in exact])
    for (version, seed), output in zip(versions, outputs, strict=True):
        assert made_by(output) == [(version, False)]
        true_to(output, {version: reference[seed]})
    # Pinned weights outlive a commit between the wakes, which is no sleep of theirs.
    ends = ["weights", None if policy == "Pin" else "weights"]
    assert [output["abort_reason"] for output in outputs] == ends


@pytest.mark.parametrize("policy", ["Drain", "Keep"])
def test_the_prefix_cache_never_mixes_versions(
    worker: Served, reference: dict[int, Reference], policy: str
) -> None:
    if policy not in worker.able["in_flight"]:
        pytest.skip(f"{worker.kind} declares no {policy}")
    prompt = [20 + n % 700 for n in range(800)]
    sampling = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    seeds = {}
    for seed in (1, 2, 1, 3):
        if seed != worker.seed():
            worker.load(seed, in_flight=policy)
        version = worker.state()["weights"]["active"]["version"]
        seeds[version] = reference[seed]
        for turn in ("first", "again"):
            answer = worker.generate(token_ids=prompt, sampling=sampling).json()
            [output] = answer["outputs"]
            sound(output)
            assert made_by(output) == [(version, False)]
            assert output["token_ids"] == reference[seed].greedy(prompt, 12), (seed, turn)
            true_to(output, seeds, prompt)
            cached = answer["usage"]["cached_tokens"]
            if turn == "first" or not worker.able["prefix_cache"]:
                assert cached == 0, f"seed {seed} found KV of other weights"
            else:
                assert cached > 0


def test_a_reset_forgets_prefixes_while_a_request_runs(worker: Served) -> None:
    prompt = [500 + n % 400 for n in range(600)]

    def cached() -> int:
        answer = worker.generate(token_ids=prompt, sampling=GREEDY)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["cached_tokens"])

    cached()
    assert (cached() > 0) is worker.able["prefix_cache"]
    finish = worker.busy(1, max_tokens=TOKENS)
    assert worker.post("cache/reset").status_code == 200
    assert cached() == 0
    assert (cached() > 0) is worker.able["prefix_cache"]
    answers(finish())


def test_salts_keep_prefixes_apart(worker: Served, reference: dict[int, Reference]) -> None:
    prompt = [1000 + n % 300 for n in range(600)]

    def ask(salt: str) -> tuple[int, Output]:
        answer = worker.generate(token_ids=prompt, sampling=GREEDY, cache_salt=salt)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        return body["usage"]["cached_tokens"], body["outputs"][0]

    if not worker.able["cache_salt"]:
        answer = worker.generate(cache_salt="a")
        assert (answer.status_code, slug(answer)) == (422, "unsupported")
        assert answer.json()["errors"][0]["field"] == "cache_salt"
        return
    assert [ask("a")[0], ask("b")[0]] == [0, 0]
    assert ask("a")[0] > 0
    # Who salts alone may reuse KV of other weights over a commit, and then says so.
    worker.load(2)
    cached, output = ask("a")
    assert (cached > 0) is output["weights"][0]["stale_kv"]
    if not cached:
        assert output["token_ids"] == reference[2].greedy(prompt, 8)


def test_many_updates_below_a_steady_load(worker: Served, reference: dict[int, Reference]) -> None:
    """Commits in a row with whatever runs: nothing lost, every token as its span says."""
    judges, seed = {worker.state()["weights"]["active"]["version"]: reference[1]}, 1
    policies = [p for p in POLICIES if p in worker.able["in_flight"]]
    loads = []
    for policy in policies:
        seed = 3 - seed
        identity = worker.stage_next(seed)
        loads.append(worker.busy(6, 120))
        worker.commit(*identity, in_flight=policy, deadline_seconds=30)
        judges[identity[1]] = reference[seed]
    outputs = answers([response for load in loads for response in load()])
    assert len(outputs) == 6 * len(policies)
    for output in outputs:
        true_to(output, judges)
        assert output["stop_reason"] == "length" or output["abort_reason"] == "weights"


@pytest.mark.parametrize("damage", ["missing", "unexpected", "ill-shaped"])
def test_bytes_that_are_no_weights_of_this_model(
    worker: Served, tmp_path: Path, damage: str
) -> None:
    """Refused by name while the old weights serve; nothing is left staged."""
    before = worker.outputs(GREEDY)[0]["token_ids"]
    folder = worker.folder / f"{tmp_path.name}"
    shutil.copytree(worker.models.weights(2), folder)
    (folder / "manifest.json").unlink(missing_ok=True)
    file, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    match damage:
        case "missing":
            del tensors[name]
        case "unexpected":
            tensors[name + "_2"] = tensors[name].clone()
            name += "_2"
        case "ill-shaped":
            tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, file)
    epoch, version = worker.next_version()
    slot = worker.stage(epoch, version, folder)
    assert slot["phase"] == "Failed"
    assert name in slot["error"]
    assert worker.post("weights/commit", epoch=epoch, version=version).status_code == 409
    assert worker.outputs(GREEDY)[0]["token_ids"] == before
    worker.load(2)
    assert worker.outputs(GREEDY)[0]["token_ids"] != before
