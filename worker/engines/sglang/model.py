"""What the worker must know of the model: its configuration, tokenizer and weights' layout."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_worker import weights
from rollout_worker.checkpoints import Source, open_source
from rollout_worker.engine import EngineError
from rollout_worker.engines import EngineOptions

logger = logging.getLogger(__name__)

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


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
        return self._decode(token_ids, skip_special=False)

    def plain_text(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids without special tokens."""
        return self._decode(token_ids, skip_special=True)

    def _decode(self, token_ids: Iterable[int], *, skip_special: bool) -> str:
        if self.tokenizer is None:
            raise EngineError("the model's folder holds no tokenizer: token ids only")
        return str(
            self.tokenizer.decode(
                list(token_ids),
                skip_special_tokens=skip_special,
                clean_up_tokenization_spaces=False,
            )
        )


def read_model(options: EngineOptions) -> Model:
    """Read everything but the weights' bytes; blocks.

    Raises:
        EngineError: not a model that can be served; the text says what to change.
    """
    config = _json(options.model / "config.json")
    if not config:
        raise EngineError(f"{str(options.model)!r} holds no config.json: point to a model folder")
    config |= config.get("text_config") or {}
    source = open_source(options.model)
    try:
        vocab = int(config["vocab_size"])
    except (KeyError, ValueError) as error:
        raise EngineError("the model's config.json names no vocab_size") from error
    return Model(
        tokenizer=_tokenizer(options.model),
        layout=_layout(config, source),
        eos_token_ids=_eos(options.model, config),
        max_length=_max_length(options, config),
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


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise EngineError(f"{str(file)!r} cannot be read: {error}; repair or remove it") from error
    return value if isinstance(value, dict) else {}


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


def _eos(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """Return the ids that end an output, generation_config.json before config.json."""
    own = _json(folder / "generation_config.json").get("eos_token_id")
    value = config.get("eos_token_id") if own is None else own
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])


def _max_length(options: EngineOptions, config: dict[str, Any]) -> int:
    known = config.get("max_position_embeddings")
    if options.max_length is None:
        if known is None:
            raise EngineError("the model's config names no maximum length: set max_length")
        return int(known)
    if known is not None and options.max_length > known:
        raise EngineError(
            f"max_length {options.max_length} is above the model's {known}: lower max_length"
        )
    return options.max_length


def _tokenizer(folder: Path) -> Any | None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        logger.info("%s holds no tokenizer: token ids only, no stop strings", folder)
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise EngineError(
            f"the tokenizer of {str(folder)!r} cannot be loaded: {error}; repair its files, or "
            "remove them to serve token ids only"
        ) from error
