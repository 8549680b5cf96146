"""What TRL's rollout asks of a pool, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollout_client.integrations.trl import TrlRollout, _sampling_of


def trainer_of(**fields: Any) -> Any:
    args = SimpleNamespace(
        max_completion_length=8, temperature=1.0, top_p=1.0, top_k=0, min_p=None,
        repetition_penalty=1.0, generation_kwargs=fields.pop("generation_kwargs", None),
    )  # fmt: skip
    state = SimpleNamespace(global_step=0)
    made = {"args": args, "tools": [], "eos_token_ids": [256, 257], "state": state, **fields}
    return SimpleNamespace(**made)


@pytest.mark.parametrize(
    ("given", "stops"),
    [(None, [256, 257]), ({"stop_token_ids": [9]}, [9, 256, 257]), ({"ignore_eos": True}, None)],
)
def test_completions_end_where_trl_masks_them(given: Any, stops: list[int] | None) -> None:
    """A base model's checkpoint does not name the tokenizer's end of a turn."""
    assert _sampling_of(trainer_of(generation_kwargs=given)).get("stop_token_ids") == stops


@pytest.mark.parametrize(
    ("prompt", "tools", "why"),
    [
        ("a", [print], "leave tools and environment_factory out"),
        ([{"role": "user", "content": [{"type": "image"}]}], [], "TrlRollout sends no pictures"),
    ],
)
def test_what_would_not_reach_the_pool_is_refused(prompt: Any, tools: list[Any], why: str) -> None:
    rollout = TrlRollout(None)  # type: ignore[arg-type]
    rollout._published = 0
    with pytest.raises(ValueError, match=why):
        rollout([prompt], trainer_of(tools=tools, processing_class=None))
