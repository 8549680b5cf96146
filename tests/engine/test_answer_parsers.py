"""Recorded answers, read with the parsers of vLLM and SGLang in their own environments."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import answer_reading_job
from tests.support.engine.engine_kinds import CACHE
from tests.support.engine.engine_programs import EnginePrograms
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
    tokenizer = script()._tokenizer(2048)
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_special_tokens(KIMI)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


RECORDED = {**ANSWERS, **OTHERS}
VOCABULARY = "lib/python3.*/site-packages/tml_renderers/data"
"""In SGLang's environment: has the file of gpt-oss' tokens, which vLLM would download."""
REASONING = {"vllm": ("deepseek_r1", "qwen3"), "sglang": ("deepseek-r1", "qwen3")}
WORDS = (
    *"a é\n.",
    "<",
    "{",
    "[",
    "]",
    '"',
    "think>",
    "\U0001f600",
    "<tool",
    "python_tag|>",
    "[TOOL",
)


def random_texts(family: str, count: int) -> list[tuple[str, str]]:
    """Texts around calls of a format, and their content: what is no call."""
    rng = random.Random(family)
    texts = []
    for _ in range(count):
        before, after = ("".join(rng.choices(WORDS, k=rng.randint(0, 12))) for _ in range(2))
        texts.append((f"{before}{CALLS[family]} z{after}", before + "\n z" + after))
    return texts


def plain_texts(count: int) -> list[str]:
    """Texts of pieces of marks, without a call."""
    rng = random.Random(count)
    parts = (*WORDS, "<tool_call>", "</tool_call>", "<function=", *SPECIALS[:2], "}", '{"name": ')
    return ["".join(rng.choices(parts, k=rng.randint(1, 30))) for _ in range(count)]


def long_text(family: str) -> str:
    """A call with a page of HTML of 40 KB, as agents write files by calls."""
    return CALLS[family].replace("\U0001f600", "<b>a > b</b>{x}[y] " * 2000, 1)


def cases(engine: str) -> dict[str, dict[str, Any]]:
    """What the job reads, by a name."""
    parsers = PARSERS[engine]
    found: dict[str, dict[str, Any]] = {
        family: {"tool": parsers.get(family, family), "texts": [each.text for each in answers]}
        for family, answers in RECORDED.items()
    }
    for family in CALLS:
        around = [*(text for text, _ in random_texts(family, 25)), *plain_texts(40)]
        found |= {
            f"around {family}": {"tool": parsers[family], "texts": around},
            f"long {family}": {"tool": parsers[family], "texts": [long_text(family)]},
            f"hostile {family}": {"tool": parsers[family], "texts": HOSTILE, "sizes": [1]},
        }
    thoughts = ["Hm é.</think>\n\nWell.", "<think>Hm é.</think>Well.", "Hm é."]
    both = [f"Hm.</think>Well.\n{ANSWERS['hermes'][1].text}"]
    for name in REASONING[engine]:
        opened = {"reasoning": name, "prompt": "a<think>\n"}
        closed = {"reasoning": name, "prompt": "<think>\n\n</think>\n\n"}
        found |= {
            f"hostile {name}": {"reasoning": name, "texts": HOSTILE, "sizes": [1]},
            f"opened {name}": {**opened, "texts": thoughts},
            f"closed {name}": {**closed, "texts": ["Well."]},
            f"both {name}": {**opened, "tool": "hermes", "texts": both},
        }
    names = [{"tool": "odd"}, {"reasoning": "odd"}, {"tool": "response_template"}]
    return {**found, **{f"refused {number}": each for number, each in enumerate(names)}}


@dataclass(frozen=True)
class Results:
    """What came of the cases of one engine."""

    engine: str
    answers: dict[str, dict[str, Any]]

    def found(self, name: str) -> list[list[list[Any]]]:
        """For each text of a case what was read, whole and in pieces."""
        answer = self.answers[name]
        assert "error" not in answer, answer
        found: list[list[list[Any]]] = answer["found"]
        return found


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    programs: EnginePrograms = request.getfixturevalue(f"{request.param}_programs")
    [vocabulary] = (CACHE / "env-sglang").glob(VOCABULARY)
    answers = programs.read_answer(
        Path(answer_reading_job.__file__),
        request.param,
        write_tokenizer(tmp_path_factory.mktemp("marks")),
        asked={"tools": TOOLS, "cases": cases(request.param)},
        TIKTOKEN_ENCODINGS_BASE=str(vocabulary),
    )
    return Results(request.param, answers)


def expected(answer: Recorded) -> list[Any]:
    content = answer.content
    if content is None:
        content = answer.text
        for mark in SPECIALS:
            content = content.replace(mark, "")
    return [content, answer.reasoning, [[name, ARGUMENTS] for name in answer.calls]]


@pytest.mark.parametrize("family", RECORDED)
def test_recorded_answers_are_read_whole_and_in_pieces(results: Results, family: str) -> None:
    for answer, reads in zip(RECORDED[family], results.found(family), strict=True):
        for content, reasoning, calls in reads:
            said = [[name, json.loads(arguments)] for name, arguments in calls]
            assert [content, reasoning, said] == expected(answer), answer.text


@pytest.mark.parametrize("family", CALLS)
def test_no_text_outside_of_calls_is_lost(results: Results, family: str) -> None:
    texts, plain = random_texts(family, 25), plain_texts(40)
    found = results.found(f"around {family}")
    for (text, content), reads in zip(texts, found, strict=False):
        for read in reads:
            assert "".join(read[0].split()) == "".join(content.split()), text
            assert len(read[2]) == 2, text
    for text, reads in zip(plain, found[len(texts) :], strict=True):
        clean = text
        for mark in SPECIALS:
            clean = clean.replace(mark, "")
        assert [read[0] for read in reads if not read[2]] == [clean] * 4, text


@pytest.mark.parametrize("family", CALLS)
def test_long_arguments_take_no_time(results: Results, family: str) -> None:
    [reads] = results.found(f"long {family}")
    assert [[call[0] for call in read[2]] for read in reads] == [["add", "mul"]] * 4
    assert results.answers[f"long {family}"]["seconds"] < 4, "four times"


def test_hostile_texts_take_little_time(results: Results) -> None:
    for name in (*CALLS, *REASONING[results.engine]):
        assert results.answers[f"hostile {name}"]["seconds"] < 3, name


def test_reasoning_is_apart(results: Results) -> None:
    for name in REASONING[results.engine]:
        opened = results.found(f"opened {name}")
        assert [[part.strip() for part in read[:2]] for read in opened[0]] == [
            ["Well.", "Hm é."]
        ] * 4
        assert [read[:2] for read in opened[1]] == [["Well.", "Hm é."]] * 4
        assert [read[:2] for read in opened[2]] == [["", "Hm é."]] * 4, "cut off"
        assert [read[:2] for read in results.found(f"closed {name}")[0]] == [["Well.", ""]] * 4
        [both] = results.found(f"both {name}")
        for content, reasoning, calls in both:
            assert (reasoning, [call[0] for call in calls]) == ("Hm.", ["add", "mul"])
            assert content.split() == ["Well.", "a", "b", "c"]


def test_names_that_an_engine_does_not_have_are_refused(results: Results) -> None:
    tool, reasoning, template = (results.answers[f"refused {n}"]["error"] for n in range(3))
    known = f"the {results.engine} engine has no such parser: use one of"
    assert f"--tool-call-parser 'odd': {known}" in tool
    assert "hermes" in tool
    assert "--reasoning-parser 'odd'" in reasoning
    assert "it has no response_template" in template
