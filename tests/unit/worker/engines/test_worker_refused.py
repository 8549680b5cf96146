"""What vLLM and SGLang refuse: flags as docs/engine-limits.md lists them, untested versions, too many listed tokens."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rollout_worker.engine import EngineError, EngineRequest, InvalidRequest
from rollout_worker.engines import tested
from rollout_worker.engines.sglang import settings as sglang
from rollout_worker.engines.vllm import settings as vllm
from rollout_worker.engines.vllm.intake import VllmModel, check_request
from rollout_worker.schemas import SamplingParams

ROOT = Path(__file__).parents[4]
DOCS = ROOT / "docs" / "engine-limits.md"
REFUSED = {"vllm": vllm.REFUSED_FLAGS, "sglang": sglang.REFUSED_FLAGS}


@pytest.mark.parametrize("engine", REFUSED)
def test_the_docs_have_the_table(engine: str) -> None:
    """A row for each reason."""
    flags: dict[str, list[str]] = {}
    for flag, why in REFUSED[engine].items():
        flags.setdefault(why, []).append(f"`{flag}`")
    rows = (f"| {', '.join(names)} | {why} |" for why, names in flags.items())
    assert "\n".join(rows) in DOCS.read_text()


def test_what_a_gang_sets_is_refused() -> None:
    """So that no other test passes on a table that lacks it."""
    assert {"--nnodes", "--node-rank"} <= vllm.REFUSED_FLAGS.keys() & sglang.REFUSED_FLAGS.keys()
    assert {"--master-addr", "--master-port"} <= vllm.REFUSED_FLAGS.keys()
    never = {"--dist-init-addr", "--pp-size", "--enable-dp-attention", "--attn-dp-size"}
    assert never <= sglang.REFUSED_FLAGS.keys()


def test_a_cache_whose_copies_a_pause_would_stop_is_refused() -> None:
    with pytest.raises(EngineError, match="a commit under load would end it"):
        sglang.parse_flags(("--enable-hierarchical-cache",))


@pytest.mark.parametrize("flag", vllm.REFUSED_FLAGS)
def test_every_flag_of_vllms_table_is_refused_in_each_spelling(flag: str) -> None:
    for spelled in (flag, f"{flag}=x", f"{flag}.key=x", flag[:2] + flag[2:].replace("-", "_")):
        with pytest.raises(EngineError, match=f"{flag} can't be given: "):
            vllm.parse_flags((spelled, "x"))


@pytest.mark.parametrize("flag", sglang.REFUSED_FLAGS)
def test_every_flag_of_sglangs_table_is_refused_in_each_spelling(flag: str) -> None:
    for spelled in (flag, f"{flag}=x", flag[:-1], f"{flag[:-1]}=x"):
        with pytest.raises(EngineError, match=r"engine\.args of the sglang engine: --"):
            sglang.parse_flags((spelled, "x"))


@pytest.mark.parametrize(("engine", "pins"), [("vLLM", "vllm"), ("SGLang", "sglang")])
def test_the_tested_versions_are_those_that_are_installed(engine: str, pins: str) -> None:
    locked = [ROOT / "requirements" / f"{name}.txt" for name in (pins, f"{pins}-cpu")]
    found = [re.search(rf"^{pins}(?:-cpu)?==(\S+)", f.read_text(), re.M) for f in locked]
    assert [match and match[1] for match in found] == [tested.TESTED_VERSIONS[engine]] * 2
    extra = f'"{pins}=={tested.TESTED_VERSIONS[engine]}"'
    assert extra in (ROOT / "pyproject.toml").read_text(), "pip installs what the worker takes"


@pytest.mark.parametrize("engine", tested.TESTED_VERSIONS)
def test_another_version_is_refused_by_name(engine: str) -> None:
    assert tested.untested_version_refusal(engine, f"{tested.TESTED_VERSIONS[engine]}+cpu") is None
    why = tested.untested_version_refusal(engine, "9.9.9")
    assert why is not None
    assert all(
        word in why
        for word in (engine, "9.9.9", tested.TESTED_VERSIONS[engine], tested.ALLOW_UNTESTED_FLAG)
    )


def test_one_flag_lets_another_version_of_sglang_start() -> None:
    given = sglang.parse_flags(("--tp-size", "2", tested.ALLOW_UNTESTED_FLAG))
    assert (given.any_version, given.flags) == (True, ("--tp-size", "2"))


BOUNDED = VllmModel(64, 4096, frozenset({2}), None, bounded=True)


def request(**sampling: object) -> EngineRequest:
    params = SamplingParams.model_validate({"max_tokens": 4, **sampling})
    return EngineRequest("r", (5,), params, "sampling")


@pytest.mark.parametrize(
    ("field", "sampling", "prompt"),
    [
        ("token_ids", {}, (5, 4096)),
        ("sampling.temperature", {"temperature": 0.005}, (5,)),
        ("sampling.temperature", {"temperature": 2.5}, (5,)),
        ("sampling.logit_bias", {"logit_bias": {"4096": 1.0}}, (5,)),
        ("sampling.allowed_token_ids", {"min_tokens": 1, "allowed_token_ids": [2]}, (5,)),
    ],
    ids=["id", "cold", "hot", "bias", "nothing allowed"],
)
def test_what_vllms_model_can_not_do_is_refused(
    field: str, sampling: dict[str, object], prompt: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_request(replace(request(**sampling), token_ids=prompt), BOUNDED)
    assert refused.value.field == field


MANY: dict[str, dict[str, object]] = {
    "sampling.allowed_token_ids": {"allowed_token_ids": list(range(1025))},
    "sampling.logit_bias": {"logit_bias": {str(token): 1.0 for token in range(1025)}},
    "sampling.stop_token_ids": {"stop_token_ids": list(range(10, 138)), "min_tokens": 1},
}


@pytest.mark.parametrize("field", MANY)
def test_what_would_end_vllms_core_is_refused_before(field: str) -> None:
    asked = request(**MANY[field])
    with pytest.raises(InvalidRequest, match=r"at most \d+ tokens .* send fewer") as refused:
        check_request(asked, BOUNDED)
    assert refused.value.field == field
    check_request(asked, replace(BOUNDED, bounded=False))


@pytest.mark.parametrize(
    "sampling",
    [
        {"allowed_token_ids": list(range(1024))},
        {"logit_bias": {str(token): 1.0 for token in range(1024)}},
        {"stop_token_ids": list(range(10, 137)), "min_tokens": 1},
        {"stop_token_ids": list(range(10, 200))},
    ],
    ids=["allowed", "biases", "stops", "stops without min_tokens"],
)
def test_what_vllms_sampler_has_room_for_passes(sampling: dict[str, object]) -> None:
    check_request(request(**sampling), BOUNDED)
