"""What the worker must know of the model: its configuration, tokenizer and weights' layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_worker.engine import EngineError, Entry, Layout
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.checkpoint import COMPUTE_DTYPES, dtype_of, layout_of
from rollout_worker.engines.folder import (
    decode,
    eos_ids,
    load_tokenizer,
    max_length,
    read_config,
)
from rollout_worker.sources.files import open_source


@dataclass(frozen=True, slots=True)
class Model:
    """A model folder, read."""

    tokenizer: Any | None
    layout: Layout
    eos_token_ids: frozenset[int]
    max_length: int
    vocab_size: int
    dtype: str
    bytes_total: int

    def text(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids with its special tokens, for stop strings."""
        return decode(self.tokenizer, token_ids, special=True)


def read_model(options: EngineOptions) -> Model:
    """Read everything but the weights' bytes; blocks.

    Raises:
        EngineError: not a model that can be served; the text says what to change.
    """
    config = read_config(options.model)
    config |= config.get("text_config") or {}
    _check_quantisation(config)
    source = open_source(options.model)
    try:
        vocab = int(config["vocab_size"])
    except (KeyError, ValueError) as error:
        raise EngineError("the model's config.json names no vocab_size") from error
    return Model(
        tokenizer=load_tokenizer(options.model),
        layout=layout_of(source.entries, tied=bool(config.get("tie_word_embeddings"))),
        eos_token_ids=eos_ids(options.model, config.get("eos_token_id")),
        max_length=max_length(options.max_length, config.get("max_position_embeddings")),
        vocab_size=vocab,
        dtype=_dtype(options, config, source.entries),
        bytes_total=source.bytes_total,
    )


def _check_quantisation(config: dict[str, Any]) -> None:
    """Refuse fp8 with a scale for each tensor: SGLang's updates would rework it twice (0.5.23)."""
    found = config.get("quantization_config") or {}
    if found.get("quant_method") == "fp8" and not found.get("weight_block_size"):
        raise EngineError(
            "the model's config.json: quantization_config is fp8 with a scale for each tensor, "
            "whose updates SGLang gets wrong: use block-wise fp8 (weight_block_size) or bf16"
        )


def _dtype(options: EngineOptions, config: dict[str, Any], entries: Sequence[Entry]) -> str:
    """Return the checkpoint's dtype, which SGLang's own `auto` would halve if it is float32."""
    if options.dtype != "auto":
        return options.dtype
    named = config.get("dtype") or config.get("torch_dtype")
    if named in COMPUTE_DTYPES.values():
        return str(named)
    return dtype_of(entries) or "auto"
