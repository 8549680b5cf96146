"""Prompts and options that other clients take otherwise: the refusal names the fix."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rollout_client.generating.generate_options import make_request
from tests.support.unit.chatstyles import tokenizer

PROMPT = [5, 6, 7]


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"temperature": 0.8}, "put it into sampling, as in sampling={'temperature': …}"),
        ({"max_tokens": 4}, "put it into sampling, as in sampling={'max_tokens': …}"),
        ({"timeout": 4}, "no argument 'timeout': use deadline_seconds"),
        ({"sampling": {"stop": "e"}}, "not 'e': write a list of strings, also for one"),
        ({"sampling": {"top_k": -1}}, "not '-1': 0 stands for all tokens"),
        ({"logprobs": True}, "not 'True': 'sampling' is what an output has by default"),
        ({"logprobs": 1}, "not '1': 'sampling' is what an output has by default"),
    ],
    ids=str,
)
def test_what_other_clients_call_otherwise_names_the_fix(options: Any, fix: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(fix)):
        make_request(PROMPT, options)


@pytest.mark.parametrize("bad", [-1, 0.5, {"role": "user"}], ids=str)
def test_one_bad_id_is_one_mistake(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"^token_ids\.0: [^;]*$"):
        make_request([bad], {})


def test_what_a_chat_template_returns_names_its_ids() -> None:
    """As transformers 5 does by default."""
    tok = tokenizer("qwen")
    made = tok.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=True)
    with pytest.raises(TypeError, match=r"not a BatchEncoding: pass its \['input_ids'\], or give"):
        make_request(made, {})
    assert make_request(made["input_ids"], {}).token_ids == tuple(made["input_ids"])
