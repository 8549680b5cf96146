"""Chat templates of many model families, as wheels ship them, and what each prints itself."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import cache, cached_property
from importlib.metadata import PackagePath, distribution, distributions
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from tests.support.unit.chatstyles import trained

SPECIAL = re.compile(
    r"<[|\uff5c]?[A-Za-z_/][^<>{}\s'\"\\]*>|\[[A-Z_/]+\]|\[\|[a-z]+\|\]|\[e~\[|\]~!?b[\]\[]"
)
"""What looks like a token of its own in a template."""

_ROLES = ("system", "user", "assistant", "tool", "observation")
"""Some templates put a role between the halves of its token."""
_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eot|>", "<|END_OF_TURN_TOKEN|>", "<end_of_turn>", "<turn|>"),
    *("<|end|>", "<|return|>", "<|endoftext|>", "[|endofturn|]", "[e~[", "<|EOT|>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|end_of_sentence|>"),
)
"""What families end an answer with; the others with `</s>`."""


CACHE = Path(os.environ.get("ROLLOUT_CACHE", Path(__file__).parents[3] / ".cache"))

SOURCES = {
    "axolotl": "env-templates",
    "xinference": "env-templates",
    "vllm": "env-vllm/lib/python3.*/site-packages",
    "sglang": "env-sglang/lib/python3.*/site-packages",
}
"""Wheels, and below which folder of the cache they lie; `make prepared` puts them there."""


@cache
def templates() -> dict[str, str]:
    """Return those of the `trl` wheel, by name."""
    files = distribution("trl").files or []
    found = [file for file in files if file.match("trl/chat_templates/*.jinja")]
    return {file.stem: file.read_text() for file in sorted(found)}


@cache
def elsewhere() -> dict[str, str]:
    """Return those of the other wheels by wheel and name, each text once."""
    seen = {text: name for name, text in templates().items()}
    for wheel, folder in SOURCES.items():
        below = [*map(str, CACHE.glob(folder))]
        builds = [distributions(name=name, path=below) for name in (wheel, f"{wheel}-cpu")]
        for file in sorted(file for dist in chain(*builds) for file in dist.files or []):
            for name, text in _read(wheel, file):
                seen.setdefault(text, f"{wheel}/{name}")
    return {name: text for text, name in seen.items() if "/" in name}


def _read(wheel: str, file: PackagePath) -> list[tuple[str, str]]:
    if file.suffix == ".jinja" and "rerank" not in file.parts:
        return [(file.stem, file.read_text())]
    if wheel != "xinference" or not file.match("xinference/model/llm/models/*.json"):
        return []
    models = json.loads(file.read_text())
    found = [(model["model_name"], model.get("chat_template") or "") for model in models]
    return [(name, text) for name, text in found if "{%" in text]


def text_of(name: str) -> str:
    return (elsewhere() if "/" in name else templates())[name]


@cache
def tokenizer(name: str) -> Any:
    """Return a small tokenizer with a template, and the special tokens that it prints."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    text = text_of(name)
    backend = Tokenizer.from_str(trained())
    roles = {f"<|{role}|>" for role in _ROLES} if re.search(r"<\|(\{\{|['\"])", text) else ()
    specials = sorted({"<s>", "</s>", *roles, *SPECIAL.findall(text)})
    backend.add_special_tokens([AddedToken(each, special=True) for each in specials])
    eos = next((end for end in _ENDS if end in text), "</s>")
    found = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=eos, pad_token=eos,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    found.chat_template = text
    return found


class Oracle:
    """What a template prints of whole conversations, in whatever form it takes them."""

    def __init__(self, name: str, tools: Sequence[Any]) -> None:
        self.tokenizer, self.tools = tokenizer(name), list(tools)
        self._forms = [(items, text) for items in (False, True) for text in (False, True)]

    @cached_property
    def prints_calls(self) -> bool:
        """Whether it prints what a tool is called with."""
        call = {"id": "call00000", "type": "function"}
        function = {"name": "add", "arguments": {"a": "zwölf"}}
        calls = {"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]}
        return "zwölf" in (self.text([{"role": "user", "content": "q"}, calls]) or "")

    @cached_property
    def close(self) -> str:
        """The token that it prints right behind an answer, and a question."""
        said = ("user", "q"), ("assistant", "zwölf"), ("user", "then")
        text = self.text([{"role": role, "content": content} for role, content in said]) or ""
        found = SPECIAL.match(text.rpartition("zwölf")[2].lstrip())
        return found[0] if found else ""

    def text(self, messages: Sequence[Any], *, opened: bool = False, words: int = 0) -> str | None:
        """Return the render; None: the template takes them in no form, or prints too few of them.

        Args:
            messages: With contents as text and arguments as mappings.
            opened: With the generation prompt.
            words: So many of the last contents must be printed; 0: all of them.
        """
        said = [m for m in messages if m["role"] != "system" and not m.get("tool_calls")]
        wanted = [message["content"] for message in said][-words:]
        for form in self._forms:
            try:
                text = self.tokenizer.apply_chat_template(
                    [_in_form(message, *form) for message in messages], tools=self.tools or None,
                    add_generation_prompt=opened, tokenize=False,
                )  # fmt: skip
            except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
                continue
            if all(word in text for word in wanted) and not re.search(
                r"""['"]type['"]: ?['"]text""", text
            ):
                return str(text)
        return None


def _in_form(message: Any, items: bool, text: bool) -> Any:
    found = dict(message)
    if items:
        found["content"] = [{"type": "text", "text": found["content"]}]
    if text and "tool_calls" in found:
        found["tool_calls"] = [_with_text_arguments(call) for call in found["tool_calls"]]
    return found


def _with_text_arguments(call: Any) -> Any:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}
