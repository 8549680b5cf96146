"""Answers as models write them, in six formats of tool calls, and what they say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.engine.tinymodels import script

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            },
        },
    }
    for name in ("add", "mul")
]
ARGUMENTS = {"a": 1, "b": 'é"\u4e16\U0001f600'}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
BAR = "\N{FULLWIDTH VERTICAL LINE}"
BEGIN, CALL, SEP, CALL_END, END = (
    f"<{BAR}tool▁{name}{BAR}>"
    for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
SPECIALS = [
    *("<|python_tag|>", "[TOOL_CALLS]", "<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
    *("<|call|>", "<|return|>", "<|constrain|>", BEGIN, CALL, SEP, CALL_END, END),
]
THOUGHT = "<|channel|>analysis<|message|>Hm, 1.<|end|><|start|>assistant"


def hermes(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {JSON}}}\n</tool_call>'


def coder(name: str) -> str:
    values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in ARGUMENTS.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def llama(name: str) -> str:
    return f'{{"name": "{name}", "parameters": {JSON}}}'


def deepseek(*names: str) -> str:
    calls = (f"{CALL}function{SEP}{name}\n```json\n{JSON}\n```{CALL_END}" for name in names)
    return f"{BEGIN}{chr(10).join(calls)}{END}"


def harmony(name: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{JSON}<|call|>"


@dataclass(frozen=True)
class Recorded:
    """An answer: its text, and what it holds. `content` None: all of the text, without its special tokens."""

    text: str
    calls: tuple[str, ...] = ()
    content: str | None = None
    reasoning: str = ""


def broken(text: str) -> Recorded:
    """One that stays text."""
    return Recorded(text)


MISTRAL = (
    f'[TOOL_CALLS] [{{"name": "add", "arguments": {JSON}}}, {{"name": "mul", "arguments": {JSON}}}]'
)
NESTED = json.dumps({"name": "add", "arguments": {"b": hermes("mul")}}, ensure_ascii=False)
CALLS = {
    "hermes": f"{hermes('add')}\n{hermes('mul')}",
    "coder": f"{coder('add')}\n{coder('mul')}",
    "llama": f"{llama('add')}; {llama('mul')}",
    "mistral": MISTRAL,
    "deepseek": deepseek("add", "mul"),
}
"""Two calls of each format that has marks."""
ANSWERS: dict[str, list[Recorded]] = {
    "hermes": [
        Recorded(f"Let me < é.\n{hermes('add')}\n{hermes('mul')}", ("add", "mul"), "Let me < é."),
        Recorded(f"a {hermes('add')} b {hermes('mul')} c", ("add", "mul"), "a  b  c"),
        broken(f"a {hermes('add')[:-20]}"),
        broken('a <tool_call>{"name": "add", "arguments": {"a": }}</tool_call> b'),
        broken(f"a <tool_call>\n{NESTED[:-1]}\n</tool_call> b"),
    ],
    "coder": [
        Recorded(f"Let me < é.\n{coder('add')}\n{coder('mul')}", ("add", "mul"), "Let me < é."),
        Recorded(f"a {coder('add')} b", ("add",), "a  b"),
        broken(f"a {coder('add')[:-20]}"),
        broken("a <tool_call>add</tool_call> b"),
        broken(f"a <tool_call>\n<function=add>\n<parameter=b>\n{coder('mul')}\n</parameter>"),
    ],
    "llama": [
        Recorded(f"{llama('add')}; {llama('mul')}", ("add", "mul"), ""),
        Recorded(f"Well é. <|python_tag|>{llama('add')} b", ("add",), "Well é.  b"),
        broken(f"a {llama('add')[:-5]}"),
        broken('use {x} and {"a": 1} é'),
        broken(f'{{"a": {llama("add")}}}'),
    ],
    "mistral": [
        Recorded(f"Well é.{MISTRAL} b", ("add", "mul"), "Well é. b"),
        broken(f"a {MISTRAL[:-5]}"),
        broken("a [TOOL_CALLS] {} b"),
    ],
    "deepseek": [
        Recorded(f"Well é.\n{deepseek('add', 'mul')} b", ("add", "mul"), "Well é.\n b"),
        broken(f"a {deepseek('add')[:-10]}"),
        broken(f"a {deepseek('add', 'mul').replace('}', ']', 1)} b"),
        broken(f"a {deepseek('add').replace(CALL_END, deepseek('mul'))} b"),
    ],
    "gpt-oss": [
        Recorded(f"{THOUGHT}{harmony('add')}", ("add",), "", "Hm, 1."),
        Recorded(f"{THOUGHT}<|channel|>final<|message|>Well é.", (), "Well é.", "Hm, 1."),
        Recorded(harmony("mul"), ("mul",), ""),
        broken(f"{THOUGHT}{harmony('add').replace('}', ']', 1)}"),
    ],
}
HOSTILE = [
    *(
        "<tool_call>" * 3000,
        "<tool_call>" * 3000 + "</tool_call>",
        "<tool_call>x</tool_call>" * 1500,
    ),
    "<tool_call><function=add>" + "<parameter=a>" * 3000 + "</function></tool_call>",
    *((BEGIN + CALL + "function" + SEP) * 700 + END, (BEGIN + CALL + END) * 700),
    BEGIN + (CALL + "function" + SEP) * 60 + "a" * 20000 + END,
    *("[TOOL_CALLS]" * 3000, "[TOOL_CALLS]a[ARGS]{" * 1500, "{" * 30000, '{"a":' * 6000),
    *('{"a":1}' * 5000, "[" * 30000, "<think>" * 5000, "</think>" * 5000),
]
"""Texts of 30 KB that parsers may take long for; a caller can make a model write them."""
KIMI = [f"<|tool_{name}|>" for name in ("calls_section_begin", "call_begin", "call_argument_begin")]
KIMI += [f"<|tool_{name}|>" for name in ("call_end", "calls_section_end")]
KIMI_CALL = f"{KIMI[0]}{KIMI[1]}functions.add:0{KIMI[2]}{JSON}{KIMI[3]}{KIMI[4]}"
OTHERS = {
    "kimi_k2": [Recorded(f"Well é. {KIMI_CALL}", ("add",), "Well é."), broken("a < b [1]")],
    "pythonic": [
        Recorded(f"[add(a=1, b={ARGUMENTS['b']!r})]", ("add",), ""),
        broken("[add(a=1, b="),
        broken("[1, 2]"),
    ],
    "glm45": [
        Recorded(
            "Well é.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            f"<arg_value>{ARGUMENTS['b']}</arg_value>\n</tool_call>",
            ("add",),
            "Well é.",
        )
    ],
}
"""Of parsers that both engines have under the same name."""
PARSERS = {
    "vllm": {
        "hermes": "hermes",
        "coder": "qwen3_coder",
        "llama": "llama3_json",
        "mistral": "mistral",
        "deepseek": "deepseek_v3",
        "gpt-oss": "openai",
    },
    "sglang": {
        "hermes": "qwen25",
        "coder": "qwen3_coder",
        "llama": "llama3",
        "mistral": "mistral",
        "deepseek": "deepseekv3",
        "gpt-oss": "gpt-oss",
    },
}
"""What each engine calls its parser of a format."""


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer that has the marks of all formats."""
    maker = script()
    tokenizer = maker._tokenizer(2048)
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_special_tokens(KIMI)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder
