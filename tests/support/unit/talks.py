"""Conversations that are built turn by turn, and compared with what a shipped template prints itself."""

from __future__ import annotations

from functools import cache
from itertools import count
from typing import Any, Literal

from rollout_client.conversation.boundaries import common_length
from rollout_client.conversation.codec import Codec
from rollout_client.conversation.template_messages import STAND_IN
from rollout_worker.schemas import RolloutRequest
from tests.support.unit.conversations import ADD, Counting
from tests.support.unit.shipped import SPECIAL, Oracle, tokenizer

End = Literal["cut", "ended", "gone on"]
"""How a policy ends: with nothing, with the token behind what it says, or, after a call, with that of
the next turn, as GLM does."""


@cache
def counted(name: str) -> Counting:
    """Return one for all conversations, as a trainer has: each turn of a kind is tried once."""
    return Counting(tokenizer(name))


class Unjudged(Exception):
    """The template prints a conversation in no form that is known here."""


class Talk:
    """A conversation that is built turn by turn, and compared with the template's own render."""

    def __init__(self, name: str, *system: str) -> None:
        self.name = name
        self.tok, self.oracle = counted(name), Oracle(name, [ADD])
        self.codec = Codec(tokenizer(name))
        self.words = (f"word{number:04}" for number in count())
        self.messages: list[Any] = [{"role": "system", "content": text} for text in system]
        self.messages += self.user()
        self.request = RolloutRequest.from_messages(
            self.messages, self.tok, tools=[ADD], max_prompt_len=10**5, max_model_len=10**6
        )
        self.checks = self.whole = 0
        """Turns whose ids are all those of the full render."""
        self.costs: list[int] = []
        """Characters that each turn had rendered and tokenized."""
        self.check()

    def user(self) -> list[Any]:
        return [{"role": "user", "content": next(self.words)}]

    def results(self, number: int) -> list[Any]:
        return [{"role": "tool", "content": next(self.words)} for _ in range(number)]

    def call(self, index: int) -> Any:
        function = {"name": "add", "arguments": {"a": next(self.words)}}
        return {"id": f"call0000{index}", "type": "function", "function": function}

    def check(self, behind: str = "") -> None:
        """Fail unless the ids, or at least those behind a word, are the render's."""
        self.checks += 1
        ids = self.request.get_generation_prompt_ids(self.tok).tolist()
        said = self.codec.decode(ids)
        assert not STAND_IN.search(said)
        render = self.oracle.text(self.messages, opened=True, words=1)
        if render is None:
            raise Unjudged
        if ids == self.codec.encode(render):
            self.whole += 1
            return
        assert behind, "a prompt is always the template's own"
        added = render.rpartition(behind)[2]
        assert said.rpartition(behind)[2] == added
        after = self.codec.encode(added)
        assert ids[-len(after) :] == after

    def turn(self, group: list[Any], calls: int = 0, *, end: End) -> None:
        """Let the policy answer as the template prints answers, then add what follows."""
        silent = calls and self.oracle.prints_calls
        said: dict[str, Any] = {"role": "assistant", "content": "" if silent else next(self.words)}
        called = [self.call(index) for index in range(calls)]
        said |= {"tool_calls": called} if calls else {}
        for message, call in zip(group, called, strict=False):
            message |= {"tool_call_id": call["id"], "name": "add"}
        text, behind = self.sampled(said, group, end)
        prompt = self.request.get_generation_prompt_ids(self.tok).tolist()
        ids, _ = self.codec.encode_after(self.codec.decode(prompt), text)
        before = self.tok.characters
        removed = self.request.counters.get("boundary_tokens_removed", 0)
        self.request.add_assistant_message(self.tok, said["content"], ids, called or None)
        self.request.add_messages(self.tok, group)
        now = self.request.get_generation_prompt_ids(self.tok).tolist()
        self.costs.append(self.tok.characters - before)
        kept = [*prompt, *ids]
        taken_back = self.request.counters.get("boundary_tokens_removed", 0) - removed
        assert now[: len(kept) - taken_back] == kept[: len(kept) - taken_back]
        self.messages += [said, *group]
        self.check(behind)

    def sampled(self, said: Any, group: list[Any], end: End) -> tuple[str, str]:
        """Return what a policy samples, up to where the template closes it, and its last word."""
        after = self.oracle.text([*self.messages, said, *group], words=len(group))
        if after is None:
            raise Unjudged
        words = [call["function"]["arguments"]["a"] for call in said.get("tool_calls", ())]
        behind = max(filter(None, [said["content"], *words]), key=after.rfind)
        if behind not in after:
            raise Unjudged
        rest, own = after.rpartition(behind)[2], ""
        if behind in words:
            alone = self.oracle.text([*self.messages, said], words=1)
            if alone is None:
                raise Unjudged
            tail = alone.rpartition(behind)[2]
            own = self.own(rest[: rest.find(group[0]["content"])], tail, end)
        ending = SPECIAL.match(rest, len(own)) if end != "cut" else None
        opened = self.codec.decode(self.request.get_generation_prompt_ids(self.tok).tolist())
        upto = after[: after.rindex(behind)] + behind
        head = upto[len(opened) :] if upto.startswith(opened) else behind
        return head + own + (ending[0] if ending else ""), behind

    def own(self, rest: str, tail: str, end: End) -> str:
        """Return what belongs to a call behind its last word: all but the token that ends it."""
        for close in filter(None, (self.oracle.close, self.codec.tokenizer.eos_token)):
            if close in rest and close in tail:
                return rest[: rest.index(close)]
        same = rest[: common_length(rest, tail)]
        last = next(reversed([m for m in SPECIAL.finditer(rest) if m.start() < len(same)]), None)
        if last is not None and (end != "gone on" or last.end() > len(same)):
            return same[: last.start()]
        return same


@cache
def speaks(name: str, *roles: str) -> bool:
    """Whether the template itself prints such a conversation."""
    messages: list[Any] = []
    for index, role in enumerate(roles):
        message: Any = {"role": role, "content": f"said{index}"}
        if role == "tool":
            call: dict[str, Any] = {"id": f"call0000{index}", "type": "function"}
            call |= {"function": {"name": "add", "arguments": {"a": "x"}}}
            messages[1].setdefault("tool_calls", []).append(call)
            message |= {"tool_call_id": call["id"], "name": "add"}
        messages.append(message)
    return Oracle(name, [ADD]).text(messages) is not None
