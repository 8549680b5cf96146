"""What a model folder says that vLLM needs no part in: EOS ids, the layout of its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout_worker import weights
from rollout_worker.checkpoints import open_source
from rollout_worker.engine import EngineError, StageProgress

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
COMPUTED = ("rotary_emb.inv_freq",)
"""Old checkpoints hold them; every model computes them itself."""


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object of the model's folder."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"{str(file)!r} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise EngineError(f"{str(file)!r} holds no JSON object: repair it")
    return value


def eos_ids(folder: Path, config: Any) -> frozenset[int]:
    """Return the ids that end an output, generation_config.json before config.json."""
    value = getattr(config, "eos_token_id", None)
    file = folder / "generation_config.json"
    if file.is_file():
        value = read_json(file).get("eos_token_id", value)
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])


def dtype_of(folder: Path) -> str:
    """Return the dtype of the checkpoint; vLLM's own choice would round float32 to bfloat16."""
    kinds = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    found = [kinds[e.spec.dtype] for e in open_source(folder).entries if e.spec.dtype in kinds]
    return max(found, key=found.count) if found else "auto"


def layout_of(folder: Path, *, tied: bool) -> weights.Layout:
    """Return what a version of this model must hold: what its checkpoint holds."""
    specs = {entry.name: entry.spec for entry in open_source(folder).entries}
    required = {name: spec for name, spec in specs.items() if not name.endswith(COMPUTED)}
    optional = {name: spec for name, spec in specs.items() if name not in required}
    head = weights.OUTPUT_HEAD
    embedding = next((name for name in sorted(specs) if name.endswith(EMBEDDINGS)), None)
    if not tied or embedding is None:
        return weights.Layout(required, optional, {})
    required.pop(head, None)
    return weights.Layout(required, {**optional, head: specs[embedding]}, {head: embedding})


def hash_of(folder: Path, progress: StageProgress, cancelled: Callable[[], bool]) -> str:
    """Return the root hash of the checkpoint; blocks while it is read."""
    source = open_source(folder)
    everything = weights.Layout({e.name: e.spec for e in source.entries}, {}, {})
    return weights.read(source, everything, lambda _: None, progress, cancelled)


def tokenizer_of(folder: Path) -> Any | None:
    """Return the model's tokenizer, None if its folder holds none."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise EngineError(
            f"the tokenizer of {str(folder)!r} cannot be loaded: {error}; repair its files, or "
            "remove them to serve token ids only"
        ) from error


def decode(tokenizer: Any, tokens: list[int], *, skip_special: bool) -> str:
    """Return the text of token ids, nothing tidied."""
    text: str = tokenizer.decode(
        tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
    )
    return text
