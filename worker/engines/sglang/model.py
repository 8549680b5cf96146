"""What the worker must know of the model: its configuration, tokenizer and weights' layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from rollout_worker import weights
from rollout_worker.engine import EngineError
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.folder import (
    decode,
    eos_ids,
    load_tokenizer,
    max_length,
    read_config,
)
from rollout_worker.sources.files import Source, open_source

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class Model:
    """A model folder, read."""

    tokenizer: Any | None
    layout: weights.Layout
    eos_token_ids: frozenset[int]
    max_length: int
    vocab_size: int
    dtype: str
    bytes_total: int

    def text(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids with its special tokens, for stop strings."""
        return decode(self.tokenizer, token_ids, special=True)

    def plain_text(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids without special tokens."""
        return decode(self.tokenizer, token_ids, special=False)


def read_model(options: EngineOptions) -> Model:
    """Read everything but the weights' bytes; blocks.

    Raises:
        EngineError: not a model that can be served; the text says what to change.
    """
    config = read_config(options.model)
    config |= config.get("text_config") or {}
    source = open_source(options.model)
    try:
        vocab = int(config["vocab_size"])
    except (KeyError, ValueError) as error:
        raise EngineError("the model's config.json names no vocab_size") from error
    return Model(
        tokenizer=load_tokenizer(options.model),
        layout=_layout(config, source),
        eos_token_ids=eos_ids(options.model, config.get("eos_token_id")),
        max_length=max_length(options.max_length, config.get("max_position_embeddings")),
        vocab_size=vocab,
        dtype=_dtype(options, config, source),
        bytes_total=source.bytes_total,
    )


def root_hash(
    options: EngineOptions,
    model: Model,
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
) -> str:
    """Read the checkpoint once for its hash, which also brings it into the page cache; blocks."""
    source = open_source(options.model)
    return weights.read(source, model.layout, lambda _: None, progress, cancelled)


def _layout(config: dict[str, Any], source: Source) -> weights.Layout:
    """Return what a version must hold: the checkpoint's tensors, a tied output head or not."""
    specs = {entry.name: entry.spec for entry in source.entries}
    # What models make by themselves and some old checkpoints hold.
    optional = {n: s for n, s in specs.items() if n.endswith("rotary_emb.inv_freq")}
    tied = {}
    embeddings = sorted(name for name in specs if name.endswith("embed_tokens.weight"))
    if config.get("tie_word_embeddings") and embeddings:
        tied = {weights.OUTPUT_HEAD: embeddings[0]}
        optional[weights.OUTPUT_HEAD] = specs[embeddings[0]]
    required = {name: spec for name, spec in specs.items() if name not in optional}
    return weights.Layout(required, optional, tied)


def _dtype(options: EngineOptions, config: dict[str, Any], source: Source) -> str:
    """Return the checkpoint's dtype, which SGLang's own `auto` would halve if it is float32."""
    if options.dtype != "auto":
        return options.dtype
    named = config.get("dtype") or config.get("torch_dtype")
    if named in DTYPES.values():
        return str(named)
    found = [DTYPES[e.spec.dtype] for e in source.entries if e.spec.dtype in DTYPES]
    return found[0] if found else "auto"
