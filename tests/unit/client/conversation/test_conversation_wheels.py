"""The chat templates of xinference, axolotl, vllm and sglang: never other ids than a template's own.

Each conversation ends in one of three ways. All ids are the template's own render; or all behind the
policy's last word are, and what was sampled before is kept where the template prints it otherwise;
or the request refuses, because the template itself prints such a conversation in no form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from rollout_worker.schemas import RolloutRequest, TemplateError
from tests.support.unit.conversations import ADD
from tests.support.unit.shipped import SOURCES, Oracle, elsewhere, templates, text_of, tokenizer
from tests.support.unit.talks import End, Talk, Unjudged, speaks

EQUAL, AS_WRITTEN, REFUSED, NONE = "equal", "as written", "refused", "without reasoning"
BRIEF = "be brief"


def chat(talk: Talk, end: End) -> None:
    for _ in range(3):
        talk.turn(talk.user(), end=end)


def tools(talk: Talk, end: End) -> None:
    most = 2 if speaks(talk.name, "user", "assistant", "tool", "tool") else 1
    talk.turn(talk.results(1), 1, end=end)
    talk.turn(talk.user(), end=end)
    talk.turn(talk.results(most), most, end=end)
    talk.turn(talk.results(1), 1, end=end)
    talk.turn(talk.user(), end=end)


def texts(talk: Talk, _: End) -> None:
    """Answers of nobody's: they are tokenized."""
    for _turn in range(3):
        said, group = {"role": "assistant", "content": next(talk.words)}, talk.user()
        talk.request.add_assistant_message(talk.tok, said["content"])
        talk.request.add_messages(talk.tok, group)
        talk.messages += [said, *group]
        talk.check(said["content"])


def reasoning(talk: Talk, end: End) -> None:
    """The policy thinks first, as far as the prompt does not begin or end that already."""
    for _ in range(3):
        word, group = next(talk.words), talk.user()
        said = {"role": "assistant", "content": f"<think>\nhmm\n</think>\n\n{word}"}
        prompt = talk.request.get_generation_prompt_ids(talk.tok).tolist()
        opened = talk.codec.decode(prompt).rstrip()
        begin = "hmm\n" if opened.endswith("<think>") else "<think>\nhmm\n"
        text = word if opened.endswith("</think>") else f"{begin}</think>\n\n{word}"
        ids = talk.codec.encode(text + (talk.oracle.close if end == "ended" else ""))
        talk.request.add_assistant_message(talk.tok, said["content"], ids)
        talk.request.add_messages(talk.tok, group)
        assert talk.request.input_ids[: len(prompt)] == prompt
        talk.messages += [said, *group]
        talk.check(word)


SCENARIOS: dict[str, tuple[Callable[[Talk, End], None], bool]] = {
    "chat": (chat, False), "system": (chat, True), "tools": (tools, False),
    "system, tools": (tools, True), "texts": (texts, False),
    "reasoning": (reasoning, False),
}  # fmt: skip


def outcome(name: str, scenario: str, end: End) -> str:
    """Hold a conversation; what the oracle can't judge must be refused by the request, too."""
    turns, system = SCENARIOS[scenario]
    if turns is reasoning and "</think>" not in text_of(name):
        return NONE
    try:
        talk = Talk(name, *([BRIEF] if system else []))
        turns(talk, end)
    except TemplateError:
        assert (name, scenario) in STRANGE or not prints(name, system, turns is tools)
        return REFUSED
    except Unjudged:
        assert refuses(name, system, turns is tools)
        return REFUSED
    return EQUAL if talk.whole == talk.checks else AS_WRITTEN


STRANGE = {("xinference/deepseek-v3", "texts")}
"""It prints an answer otherwise where that is not the last message."""


def prints(name: str, system: bool, calls: bool) -> bool:
    """Whether the template itself prints such messages."""
    brief = [{"role": "system", "content": BRIEF}, {"role": "user", "content": "said0"}]
    if system and BRIEF not in (Oracle(name, [ADD]).text(brief) or ""):
        return False
    return speaks(name, "user", *["assistant", "tool"] * calls)


def refuses(name: str, system: bool, calls: bool) -> bool:
    """Whether a request refuses messages that a template prints in no form that is known here."""
    asked = [{"role": "system", "content": BRIEF}] * system + [{"role": "user", "content": "said0"}]
    function = {"name": "add", "arguments": {"a": "x"}}
    called = [{"id": "call00000", "type": "function", "function": function}] * calls
    names = {"tool_call_id": "call00000", "name": "add"} if calls else {}
    tok = tokenizer(name)
    try:
        request = RolloutRequest.from_messages(asked, tok, tools=[ADD], max_prompt_len=10**5)
        request.add_assistant_message(tok, "w", [5], called or None)
        request.add_messages(tok, [{"role": "tool" if calls else "user", "content": "y", **names}])
    except TemplateError:
        return True
    return False


@pytest.mark.parametrize("name", elsewhere())
def test_each_turn_is_the_templates_own(name: str) -> None:
    end: End = "cut" if len(name) % 2 else "ended"
    system = prints(name, True, False)
    found = outcome(name, "system" if system else "chat", end)
    assert found != REFUSED or not prints(name, False, False)
    outcome(name, "system, tools" if system else "tools", end)
    outcome(name, "texts", end)
    outcome(name, "reasoning", end)


@pytest.mark.soak  # every day: one end for each template
@pytest.mark.parametrize("end", get_args(End))
@pytest.mark.parametrize("name", [*templates(), *elsewhere()])
def test_each_turn_is_the_templates_own_however_a_policy_ends(name: str, end: End) -> None:
    found = {scenario: outcome(name, scenario, end) for scenario in SCENARIOS}
    assert found["chat"] != REFUSED or not prints(name, False, False)


@pytest.mark.parametrize(("wheel", "least"), [("axolotl", 30), ("xinference", 70), ("vllm", 5)])
def test_the_wheels_ship_templates(wheel: str, least: int) -> None:
    found = sum(name.startswith(f"{wheel}/") for name in elsewhere())
    if not found:
        pytest.skip(f"no {SOURCES[wheel]} in the cache: make prepared")
    assert found >= least
