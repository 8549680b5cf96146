"""Which drafts vLLM may have, what a version brings of one, and what their sampling is mended with; vLLM itself is not needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout_worker.engine import (
    EngineError,
    TensorEntry,
    TensorSpec,
    WeightsLayout,
    WeightsRejected,
)
from rollout_worker.engines.vllm.ranks import extension
from rollout_worker.engines.vllm.vllm_drafts import (
    _expand_batch_to_tokens,
    add_draft,
    check_drafts,
    check_whole,
)

SPEC = TensorSpec("F32", (2,))
LAYOUT = WeightsLayout({"a": SPEC}, {}, {})


def config_of(method: str | None, model: Path | str = "") -> Any:
    drafts = SimpleNamespace(method=method, draft_model_config=SimpleNamespace(model=str(model)))
    return SimpleNamespace(speculative_config=None if method is None else drafts)


@pytest.mark.parametrize("method", [None, "ngram", "suffix", "draft_model", "eagle", "eagle3"])
def test_drafts_that_updates_can_change_are_taken(method: str | None) -> None:
    check_drafts(config_of(method), gang=False)


@pytest.mark.parametrize(
    ("method", "gang", "said"),
    [
        ("mtp", False, r"'mtp' has weights that no update changes: use one of ngram, .*eagle3"),
        ("eagle", True, r"'eagle' needs one node: .* Use one of ngram, ngram_gpu, suffix"),
    ],
)
def test_others_are_refused_with_what_can_be_used(method: str, gang: bool, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        check_drafts(config_of(method), gang=gang)
    check_drafts(config_of("ngram"), gang=gang)


def test_a_version_may_bring_all_of_a_draft_or_nothing_of_it(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(2), "y": torch.zeros(2)}, tmp_path / "model.safetensors")
    layout = add_draft(LAYOUT, config_of("draft_model", tmp_path))
    assert (layout.required, set(layout.optional)) == (LAYOUT.required, {"draft/x", "draft/y"})
    assert add_draft(LAYOUT, config_of("ngram")) is LAYOUT
    for names in (["a"], ["a", "draft/x", "draft/y"]):
        check_whole([TensorEntry(name, SPEC) for name in names], layout)
    with pytest.raises(WeightsRejected, match="'draft/y' is missing: publish all of the draft"):
        check_whole([TensorEntry(name, SPEC) for name in ("a", "draft/x")], layout)


def test_the_values_of_requests_are_spread_over_their_drafted_tokens() -> None:
    ends = torch.tensor([2, 2, 5])
    spread = _expand_batch_to_tokens(torch.tensor([0.7, 9.0, 0.0]), ends, 5, 0, 1)
    torch.testing.assert_close(spread, torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0]))
    none = _expand_batch_to_tokens(torch.tensor([3]), torch.tensor([0]), 0)
    assert none.numel() == 0


def test_a_draft_whose_copy_sleep_forgot_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(extension, "allocator_entries", dict)
    monkeypatch.setattr(extension, "load_draft", lambda *given: loaded.append(given[-1]))

    class Worker(extension.Extension):
        device, vllm_config = torch.device("cuda"), None
        model_runner = SimpleNamespace(get_model=torch.nn.Module)

        def get_draft_model(self) -> torch.nn.Module:
            return torch.nn.Module()

        def sleep(self, level: int) -> None: ...

    worker = Worker()
    worker.rollout_release(1, ["weights"])
    worker._load_draft({}, brought=False)
    assert loaded == [], "waking brings its copy back"
    worker.rollout_forget()
    worker._load_draft({}, brought=False)
    assert loaded == [None], "by its own checkpoint"
