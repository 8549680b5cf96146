"""What only vLLM can get wrong, on a model of 120 MB; everything else is in tests/contract."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from rollout_common.turn import Turn, TurnTimeout
from rollout_common.wire import SamplingMask
from rollout_worker.schemas import SamplingParams
from tests.support.engine.engine_kinds import KINDS, ROOT, left_out
from tests.support.engine.judging import TEMPERATURES, check
from tests.support.engine.judging_scores import check_rows, check_scores
from tests.support.engine.reference import Reference, distribution
from tests.support.engine.tinymodels import many_experts, script
from tests.support.engine.workers import PROMPT, Command, slug
from tests.support.processes import Process, descendants, shares_lock
from tests.support.waiting import until_sync

KIND = KINDS["vllm"]
SHAPE = {"hidden": 512, "intermediate": 1024, "layers": 4, "heads": 8, "vocab": 32768}
WEIGHTS_MB = 105
EMBEDDING = "model.embed_tokens.weight"
GPU = "gpu-0"
CLOSE = 1e-3
"""Error of its logprobs: sums are eight times as long as the tiny model's."""

pytestmark = pytest.mark.skipif(left_out(KIND) is not None, reason=str(left_out(KIND)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with a tied output head, and another version of it; and the model with its head in the checkpoint."""
    home = tmp_path_factory.mktemp("vllm-models")
    maker = script()
    maker.make_model(home / "one", 1, maker.Shape(**SHAPE))
    maker.make_weights(home / "two", 2, maker.Shape(**SHAPE))
    shutil.copytree(home / "one", home / "headed")
    file = home / "headed" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors[EMBEDDING].clone()}, file)
    return {folder.name: folder for folder in home.iterdir()}


@pytest.fixture(scope="module")
def locks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lock directory of the worker."""
    return tmp_path_factory.mktemp("vllm-turn")


@pytest.fixture(scope="module")
def worker(
    models: dict[str, Path], locks: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Command]:
    """Records raw logprobs, and has its tied head in the checkpoint, as some have; not so the contract suite's."""
    flags = ("--turn-directory", str(locks), "--turn-devices", GPU, "--logprobs", "raw")
    with served(models["headed"], tmp_path_factory.mktemp("vllm-worker"), *flags) as worker:
        yield worker


@pytest.fixture(scope="module")
def first(models: dict[str, Path]) -> Reference:
    return Reference(models["one"])


@contextmanager
def served(model: Path, home: Path, *flags: str) -> Iterator[Command]:
    flags = ("--engine", "vllm", "--max-length", "512", "--shutdown-grace", "0", *flags)
    env = {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    worker = Command(model, home / "worker.log", flags, env, python=KIND.python)
    try:
        worker.wait_active(KIND.start_seconds)
        assert not worker.state()["last_error"]
        yield worker
    finally:
        worker.terminate()
        worker.process.wait(60)
        worker.close()


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_raw_logprobs(worker: Command, first: Reference, temperature: float) -> None:
    """vLLM records one kind for all requests: the other is refused."""
    check(worker, "raw", temperature, first, close=CLOSE)
    check(worker, "sampling", temperature, first, ["plain", "top_p", "all"], close=CLOSE)


def test_raw_logprobs_are_the_default_where_they_are_recorded(worker: Command) -> None:
    assert worker.generate(sampling={"max_tokens": 2}).json()["logprobs_of"] == "raw"


def test_scores_where_raw_logprobs_are_recorded(worker: Command, first: Reference) -> None:
    """Of a prompt of the maximum length, of which vLLM makes a token more; and of a hot output."""
    text = [3 + (index * 37) % 4000 for index in range(512)]
    sampling = {"max_tokens": 0, "temperature": 0.7, "repetition_penalty": 1.2}
    answer = worker.generate(
        token_ids=text, sampling=sampling, prompt_logprobs=[400, 512], top_logprobs=9
    ).json()
    check_scores(answer["prompt_logprobs"], first, text, 400, 512, 9)
    hot = {"max_tokens": 9, "temperature": 1.7, "top_k": 5, "ignore_eos": True}
    [output] = worker.generate(sampling=hot, top_logprobs=9).json()["outputs"]
    rows = first.logits(PROMPT, output["token_ids"]).log_softmax(-1)
    check_rows(output["top_logprobs"], rows, 9)


@pytest.mark.parametrize("top_p", [0.2, 0.95, 1.0])
def test_masks_where_raw_logprobs_are_recorded(
    worker: Command, first: Reference, top_p: float
) -> None:
    """Of few ids, as bits, and of all; the logprobs stay the model's own."""
    fields = {"max_tokens": 9, "temperature": 0.5, "top_p": top_p, "ignore_eos": True}
    [output] = worker.generate(sampling=fields, return_sampling_mask=True).json()["outputs"]
    masks, tokens = SamplingMask.model_validate(output["sampling_mask"]), output["token_ids"]
    assert output["logprobs"] == pytest.approx(first.raw_logprobs(PROMPT, tokens), abs=CLOSE)
    params, logits = SamplingParams.model_validate(fields), first.logits(PROMPT, tokens)
    for index, allowed in enumerate(masks.allowed_ids()):
        expected = distribution(logits[index], PROMPT, tokens[:index], params)
        possible = {*expected.isfinite().nonzero().flatten().tolist()}
        assert tokens[index] in allowed
        assert len(possible ^ {*allowed.tolist()}) <= 0.01 * len(possible), "but for rounding"


def test_an_update_reaches_a_tied_output_head(
    worker: Command, models: dict[str, Path], first: Reference
) -> None:
    """vLLM 0.32 keeps the old packed copy of a tied head on CPUs: `extension._finish_load`."""
    before = worker.sample(12)["token_ids"]
    worker.update(1, 1, models["two"])
    after = worker.sample(12)["token_ids"]
    assert before == first.greedy(PROMPT, 12)
    assert after == Reference(models["two"]).greedy(PROMPT, 12)


def resident_mb(worker: Command) -> float:
    """Memory of vLLM's worker process."""
    pages = (Path("/proc") / str(ranks(worker).pid) / "statm").read_text().split()
    return int(pages[1]) * 4096 / 2**20


def ranks(worker: Command) -> Process:
    """The process that holds the model."""
    (found,) = (p for p in descendants(worker.process.pid) if "VLLM::Worker" in p.command)
    return found


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_waking_brings_all_of_it(worker: Command, level: int) -> None:
    before, awake = worker.sample(12)["token_ids"], resident_mb(worker)
    slept: httpx.Response = worker.post("sleep", level=level)
    assert slept.status_code == 200, slept.text
    asleep = resident_mb(worker)
    woken = worker.post("wake")
    assert woken.status_code == 200, woken.text
    # The embedding, the packed layers and the packed head: more than the checkpoint holds.
    assert awake - asleep > WEIGHTS_MB, (awake, asleep)
    assert worker.sample(12)["token_ids"] == before


@pytest.mark.soak
def test_what_vllm_alone_refuses_ends_that_request_only(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """With drafts it takes no bias, which no check of ours knows."""
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    flag = f"--engine-arg=--speculative-config={json.dumps(drafts)}"
    with served(models["one"], tmp_path, flag) as worker:
        running = worker.long(sampling={"max_tokens": 400, "ignore_eos": True})
        answer = worker.generate(sampling={"logit_bias": {"5": 1}})
        assert (answer.status_code, slug(answer)) == (422, "unsupported")
        assert "speculative" in answer.json()["detail"]
        masked = worker.generate(return_sampling_mask=True)
        assert masked.status_code == 422
        assert masked.json()["errors"][0]["field"] == "return_sampling_mask"
        assert running.result(60).json()["outputs"][0]["stop_reason"] == "length"
        assert worker.state()["restarts"] == 0


# A start of its own, and CPUs only; every start sees by itself whether an update is right.
@pytest.mark.soak
def test_an_update_reaches_experts_that_are_packed(tmp_path: Path) -> None:
    """vLLM 0.32 packs them on CPUs after the first load only: `extension._finish_load`."""
    models = {seed: many_experts(tmp_path, seed, "float32") for seed in (1, 2)}
    with served(models[1], tmp_path) as worker:
        before = worker.sample(8)["token_ids"]
        worker.update(1, 1, models[2])
        after = worker.sample(8)["token_ids"]
    assert before == Reference(models[1]).greedy(PROMPT, 8)
    assert after == Reference(models[2]).greedy(PROMPT, 8)


def test_the_turn_outlives_a_killed_worker_as_long_as_its_engine(
    worker: Command, locks: Path
) -> None:
    """The last one here, for it ends the worker that the others share."""
    trainer = Turn(locks, [GPU], "trainer-0")
    family, model = descendants(worker.process.pid), ranks(worker)
    assert shares_lock(model.pid, locks / GPU)
    assert worker.post("sleep").json()["turn"]["state"] == "Released"
    assert not shares_lock(model.pid, locks / GPU)
    assert worker.post("wake").json()["turn"]["state"] == "Held"
    assert shares_lock(model.pid, locks / GPU)
    # Stopped, it can't follow its parent.
    os.kill(model.pid, signal.SIGSTOP)
    try:
        worker.process.kill()
        worker.process.wait(30)
        with pytest.raises(TurnTimeout):
            trainer.take(1)
    finally:
        os.kill(model.pid, signal.SIGCONT)
    trainer.take(30)
    until_sync(
        lambda: not any(p.alive for p in family), 30, what="the end of all, the stopped one's"
    )


@contextmanager
def drafting(models: dict[str, Path], home: Path) -> Iterator[Command]:
    """A worker whose drafts come from the very model that it serves."""
    drafts = {"method": "draft_model", "model": str(models["one"]), "num_speculative_tokens": 3}
    flag = f"--engine-arg=--speculative-config={json.dumps(drafts)}"
    with served(models["one"], home, flag) as worker:
        yield worker


def version_with_draft(folder: Path, target: Path, draft: Path, leave: int = 0) -> Path:
    """Write a version that brings a draft; `leave`: so many tensors of the draft are left out."""
    tensors = load_file(target / "model.safetensors")
    brought = load_file(draft / "model.safetensors")
    tensors |= {f"draft/{name}": brought[name].clone() for name in sorted(brought)[leave:]}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def deltas(worker: Command, count: int = 40) -> tuple[list[int], int]:
    """Generate greedily; return the tokens, and in how many deltas they came: few, if drafts are right."""
    sampling = {"max_tokens": count, "ignore_eos": True, "temperature": 0}
    events = [data for kind, data in worker.stream(sampling=sampling) if kind == "delta"]
    return [token for each in events for token in each["token_ids"]], len(events)


def check_drafted_frequencies(worker: Command, judge: Reference) -> None:
    """A drafted token, the second one, is drawn as often as the model's distribution says."""
    sampling = {"n": 64, "max_tokens": 4, "ignore_eos": True, "temperature": 1, "top_k": 2}
    outputs = [
        output for _ in range(6) for output in worker.generate(sampling=sampling).json()["outputs"]
    ]
    assert all([(s["version"], s["end"]) for s in each["weights"]] == [(2, 4)] for each in outputs)
    first, count = Counter(each["token_ids"][0] for each in outputs).most_common(1)[0]
    seconds = Counter(each["token_ids"][1] for each in outputs if each["token_ids"][0] == first)
    logits = judge.logits([*PROMPT, first], [0])[0]
    wanted = distribution(logits, PROMPT, [first], SamplingParams(temperature=1, top_k=2)).exp()
    for token in wanted.nonzero().flatten().tolist():
        share = float(wanted[token])
        slack = 5 * (share * (1 - share) / count) ** 0.5
        assert abs(seconds[token] / count - share) < slack, (share, seconds)


@pytest.mark.soak
def test_a_version_brings_the_draft_that_guesses_its_tokens(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Right tokens and labels whatever the draft is; few steps only with the draft of these weights."""
    one, two = models["one"], models["two"]
    wanted = {name: Reference(models[name]).greedy(PROMPT, 40) for name in ("one", "two")}
    both = version_with_draft(tmp_path / "both", two, two)
    part = version_with_draft(tmp_path / "part", one, one, leave=1)
    with drafting(models, tmp_path) as worker:
        tokens, many = deltas(worker)
        assert tokens == wanted["one"]
        assert many <= 20, "the draft is the model"
        worker.update(1, 1, two)
        tokens, many = deltas(worker)
        assert tokens == wanted["two"]
        assert many >= 30, "the draft is that of other weights"
        worker.update(1, 2, both)
        tokens, many = deltas(worker)
        assert tokens == wanted["two"]
        assert many <= 20
        for level in (1, 2):
            worker.post("sleep", level=level)
            worker.post("wake")
            tokens, many = deltas(worker)
            assert (tokens, many <= 20) == (wanted["two"], True), level
        second = Reference(two)
        for temperature in TEMPERATURES:
            check(worker, "sampling", temperature, second, ["plain", "top_p"], close=CLOSE)
        check_drafted_frequencies(worker, second)
        staged = worker.stage(1, 3, part)
        assert staged["phase"] == "Failed"
        assert "publish all of the draft" in staged["error"]
        # Without a draft the version leaves what is there; a sleep brings back the checkpoint's.
        worker.update(1, 4, one)
        assert deltas(worker)[1] >= 30
        worker.post("sleep", level=2)
        worker.post("wake")
        tokens, many = deltas(worker)
        assert (tokens, many <= 20) == (wanted["one"], True)
