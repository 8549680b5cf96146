"""Tokenizers and chat templates in the styles of three model families, built here from scratch.

The templates are our own and short, but do what the families' do where it matters for continuing a
conversation: Qwen groups tool results, forgets earlier reasoning and ends turns with a newline that
the model never samples; GLM ends a turn with the next one's first token; Mistral has no generation
prompt, merges text without special tokens' help, and prints the tools and the system message before
the last question, wherever that is. `shipped` has those of many more families.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

# White space between tags is dropped; line breaks are written as {{ n }}.
QWEN = r"""
{%- macro media(content) %}{% if content is string %}{{ content }}{% else %}
{%- for i in content %}{% if i.type == 'image' %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ i.text }}{% endif %}
{%- endfor %}{% endif %}{% endmacro -%}
{%- set asked = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' %}{% set asked.last = messages.index(m) %}{% endfor -%}
{%- if tools %}{{ '<|im_start|>system' ~ n ~ 'Tools: ' ~ (tools | tojson) ~ '<|im_end|>' ~ n }}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set text = m.content or '' -%}
{%- if '</think>' in text and loop.index0 < asked.last -%}
{%- set text = text.split('</think>')[-1].lstrip(n) -%}
{%- endif -%}
{{- '<|im_start|>assistant' ~ n ~ text -}}
{%- for c in m.tool_calls or [] -%}
{{- n ~ '<tool_call>' ~ n ~ '{"name": "' ~ c.function.name ~ '", "arguments": ' -}}
{{- (c.function.arguments | tojson) ~ '}' ~ n ~ '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' ~ n -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{- n ~ '<tool_response>' ~ n ~ media(m.content) ~ n ~ '</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>' ~ n }}{% endif -%}
{%- else -%}
{{- '<|im_start|>' ~ m.role ~ n ~ media(m.content) ~ '<|im_end|>' ~ n -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' ~ n }}{% endif -%}
"""
GLM = r"""
{{- '[gMASK]<sop>' -}}
{%- if tools %}{{ '<|system|>' ~ n ~ 'Tools: ' ~ (tools | tojson) }}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif -%}
{{- n ~ '<tool_response>' ~ n ~ m.content ~ n ~ '</tool_response>' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|assistant|>' ~ n ~ (m.content or '') -}}
{%- for c in m.tool_calls or [] %}{{ n ~ '<tool_call>' ~ c.function.name ~ '</tool_call>' }}{% endfor -%}
{%- else %}{{ '<|' ~ m.role ~ '|>' ~ n ~ m.content }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' ~ n }}{% endif -%}
"""
MISTRAL = r"""
{{- '<s>' -}}
{%- set brief = messages[0].content if messages[0].role == 'system' -%}
{%- set asked = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' %}{% set asked.last = messages.index(m) %}{% endfor -%}
{%- for m in messages if m.role != 'system' -%}
{%- if m.role == 'user' -%}
{%- if tools and messages.index(m) == asked.last -%}
{{- '[AVAILABLE_TOOLS] ' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' -}}
{%- endif -%}
{{- '[INST] ' ~ (brief ~ n ~ n if brief and loop.last else '') ~ m.content ~ '[/INST]' -}}
{%- elif m.role == 'tool' -%}
{%- if not m.tool_call_id %}{{ raise_exception('tool without a call id') }}{% endif -%}
{{- '[TOOL_RESULTS] ' ~ ({'content': m.content, 'call_id': m.tool_call_id} | tojson) -}}
{{- '[/TOOL_RESULTS]' -}}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] ' ~ (m.tool_calls[0].function | tojson) ~ '</s>' }}
{%- else %}{{ ' ' ~ m.content ~ '</s>' }}{% endif -%}
{%- endfor -%}
"""


# How a text falls into words before merging: line breaks stay together, as with Qwen and Llama.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Style:
    """A family's template, the tokens that it needs, and what ends a sampled turn."""

    template: str
    specials: tuple[str, ...]
    end: str
    calls_end: str
    metaspace: bool = False


STYLES = {
    "qwen": Style(
        QWEN,
        ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
        "<|im_end|>",
        "<|im_end|>",
    ),
    "glm": Style(
        GLM,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
         "<|endoftext|>"),
        "<|user|>",
        "<|observation|>",
    ),
    "mistral": Style(
        MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>",
        "</s>",
        True,
    ),
}  # fmt: skip

CORPUS = (
    "you are a helpful assistant that answers questions about numbers and words\n",
    "what is the sum of seven and twelve? the result of the call is 19 degrees\n",
    'user assistant system tool model ipython {"name": "add", "arguments": {"a": 1, "b": 22}}\n',
    "<tool_call> </tool_call> <tool_response> </tool_response> <think> hmm </think>\n\n",
)


@cache
def tokenizer(style: str) -> Any:
    """Return a `transformers` tokenizer of a style; byte-level, or with SentencePiece's spaces."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = STYLES[style]
    backend = Tokenizer(models.BPE(byte_fallback=made.metaspace, unk_token=None))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words: Any = pre_tokenizers.Split(Regex(WORDS), "isolated")
    if made.metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
        )
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
        backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*made.specials, *(alphabet if made.metaspace else ())],
        initial_alphabet=[] if made.metaspace else alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if made.metaspace:  # the bytes are no special tokens, only the vocabulary's floor
        backend = _with_specials(backend, made.specials)
    backend.add_special_tokens([AddedToken(text, special=True) for text in made.specials])
    found = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=made.end,
        pad_token=made.specials[0],
        clean_up_tokenization_spaces=False,
    )
    found.chat_template = "{%- set n = '\\n' -%}" + made.template
    return found


def _with_specials(backend: Any, specials: tuple[str, ...]) -> Any:
    """Return the tokenizer anew with only these as special tokens."""
    import json

    from tokenizers import Tokenizer

    document = json.loads(backend.to_str())
    document["added_tokens"] = [t for t in document["added_tokens"] if t["content"] in specials]
    return Tokenizer.from_str(json.dumps(document))


@cache
def trained() -> str:
    """Return a byte-level tokenizer without special tokens, as JSON."""
    text: str = _with_specials(tokenizer("qwen").backend_tokenizer, ()).to_str()
    return text
