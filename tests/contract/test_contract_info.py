"""`GET /v1/info` tells the truth: what is declared works, what is not is refused by name."""

from __future__ import annotations

import http.client
import json
import re
from typing import Any

import pytest

from rollout_worker.schemas import (
    SAMPLING_FIELDS,
    Capabilities,
    WorkerInfo,
    WorkerState,
)
from tests.support.engine.contracts import EOS, Served
from tests.support.engine.engine_kinds import ROOT
from tests.support.engine.workers import PROMPT, slug
from tests.support.waiting import until_sync

KV_USAGE = re.compile(
    r"^(?:vllm:kv_cache_usage_perc|sglang:token_usage|hf_engine_kv_cache_usage)(?:\{.*\})? (\S+)$",
    re.M,
)


def test_the_page_is_complete(worker: Served) -> None:
    info = WorkerInfo.model_validate_json(worker.data.get("/v1/info").content)
    assert (info.api, info.engine, info.model) == ("v1", worker.kind.engine, "tiny")
    assert info.engine_version[0].isdigit()
    assert info.max_length == 2048
    assert info.eos_token_ids == tuple(sorted(EOS)), "those of generation_config.json"
    assert set(info.capabilities.sampling) <= set(SAMPLING_FIELDS)
    plain = worker.data.post(
        "/v1/generate", json={"token_ids": [60], "sampling": {"max_tokens": 1}}
    )
    assert info.capabilities.logprobs[0] == plain.json()["logprobs_of"]
    assert "Drain" in info.capabilities.in_flight
    assert "Abort" in info.capabilities.in_flight
    state = WorkerState.model_validate(worker.control.get("/v1/state").json())
    assert state.in_flight_policies == info.capabilities.in_flight, "as the operator reads it"


def test_metrics_say_how_full_the_kv_cache_is(worker: Served) -> None:
    """The dashboards read it by these names."""

    def usage() -> float:
        shares = KV_USAGE.findall(worker.data.get("/metrics").text)
        return max(map(float, shares), default=0.0)

    ends = worker.busy(4)
    until_sync(lambda: 0 < usage() <= 1, 30, what="the KV cache to be in use")
    assert {answer.status_code for answer in ends()} == {200}


def test_the_page_on_engines_says_what_it_can(worker: Served) -> None:
    """Of a model that reads text alone, without flags but that of a parser: what needs others is missing."""
    page = (ROOT / "docs" / "engines.md").read_text()
    heads, _, *rows = page.split("| capability |")[1].split("\n\n")[0].splitlines()
    column = re.findall(r"`(\w+)`", heads).index(worker.kind.engine)
    found: dict[str, str] = {}
    for row in rows:
        names, *cells = row.strip("| ").split(" | ")
        found |= dict.fromkeys(re.findall(r"`([a-z_]+)`", names), cells[column])
    assert len(found) == 8
    assert found.pop("tool_parser").startswith("with")
    for name, cell in found.items():
        assert bool(worker.able[name]) == cell.startswith("yes"), (name, cell)


def test_each_remaining_ability_of_requests(worker: Served) -> None:
    tries: dict[str, tuple[dict[str, Any], str]] = {
        "seed": ({"sampling": {"seed": 5, "max_tokens": 2}}, "sampling.seed"),
        "priority": ({"priority": 3, "sampling": {"max_tokens": 2}}, "priority"),
        "stop_strings": ({"sampling": {"stop": ["zz"], "max_tokens": 2}}, "sampling.stop"),
        "cache_salt": ({"cache_salt": "x", "sampling": {"max_tokens": 2}}, "cache_salt"),
        # This model takes none; others in test_contract_zz_pictures.
        "multimodal": ({"multimodal": {"images": [{"data": "QUJD"}]}}, "multimodal"),
    }
    for ability, (fields, path) in tries.items():
        answer = worker.generate(**fields)
        if worker.able[ability]:
            assert answer.status_code == 200, (ability, answer.text)
        else:
            assert (answer.status_code, slug(answer)) == (422, "unsupported"), ability
            assert answer.json()["errors"][0]["field"] == path


def test_every_capability_is_tried_somewhere() -> None:
    """A new capability needs a test of its own in this suite."""
    assert set(Capabilities.model_fields) == {
        *("logprobs", "sampling", "sampling_logprobs", "seed", "priority", "stop_strings"),
        *("in_flight", "sleep_levels", "memory_release", "prefix_cache", "cache_salt"),
        *("chat", "tool_parser", "prompt_logprobs", "top_logprobs", "multimodal"),
        *("structured", "return_routed_experts", "return_sampling_mask"),
        *("adapters", "adapters_in_flight"),
    }


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_clients_of_any_http_are_understood(worker: Served, version: str) -> None:
    """Whatever parser of HTTP an engine brings along."""
    body = json.dumps({"token_ids": PROMPT, "sampling": {"max_tokens": 3}, "stream": True})
    # Java's client offers HTTP/2 with each request.
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AA"}
    client = http.client.HTTPConnection(worker.data.base_url.host, worker.data.base_url.port)
    client._http_vsn_str = f"HTTP/{version}"  # type: ignore[attr-defined]  # its own switch
    try:
        client.request("POST", "/v1/generate", body, upgrade if version == "1.1" else {})
        answer = client.getresponse()
        assert answer.status == 200, answer.read()
        assert answer.headers["X-Accel-Buffering"] == "no", "else nginx keeps the pieces back"
        assert (answer.headers["Transfer-Encoding"] == "chunked") is (version == "1.1")
        assert answer.read().startswith(b"event: delta\ndata: {")
    finally:
        client.close()
