"""What every engine reads of a model's folder in the same way: EOS ids, lengths, the tokenizer."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollout_worker.engine import EngineError

logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def read_config(folder: Path) -> dict[str, Any]:
    """Return what the folder's config.json holds.

    Raises:
        EngineError: there is none, or it holds no JSON object.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise EngineError(f"{str(folder)!r} holds no config.json: point to a model folder")
    return _read_json(file)


def eos_ids(folder: Path, own: object) -> frozenset[int]:
    """Return the ids that end an output: those of generation_config.json, else `own`.

    Args:
        folder: The model's.
        own: What its config.json says: an id, a list of ids, or None.

    Raises:
        EngineError: the file is no JSON object, or names something else than ids.
    """
    file, value = folder / "generation_config.json", None
    if file.is_file():
        value = _read_json(file).get("eos_token_id")
    value = own if value is None else value
    ids = value if isinstance(value, list) else [] if value is None else [value]
    odd = [each for each in ids if type(each) is not int]
    if odd:
        raise EngineError(
            f"eos_token_id of the model in {str(folder)!r} is {value!r}: it must be a token id or "
            "a list of them; repair its generation_config.json or config.json"
        )
    return frozenset(ids)


def max_length(asked: int | None, known: int | None) -> int:
    """Return the most tokens of prompt and output together.

    Args:
        asked: What the worker was told, if anything.
        known: What the model's configuration says, if anything.

    Raises:
        EngineError: neither says it, or more is asked for than the model can.
    """
    if asked is None:
        if known is None:
            raise EngineError("the model's config names no maximum length: set max_length")
        return int(known)
    if known is not None and asked > known:
        raise EngineError(f"max_length {asked} is above the model's {known}: lower max_length")
    return asked


def load_tokenizer(folder: Path) -> Any | None:
    """Return the model's tokenizer, None if its folder holds none; blocks.

    Raises:
        EngineError: transformers can't make one of the files.
    """
    # From nothing transformers makes an empty tokenizer for the models that it knows.
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        logger.info("%s holds no tokenizer: token ids only, no stop strings", folder)
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


def decode(tokenizer: Any | None, token_ids: Iterable[int], *, special: bool) -> str:
    """Return the text of token ids, nothing tidied; `special`: with its special tokens.

    Raises:
        EngineError: there is no tokenizer.
    """
    if tokenizer is None:
        raise EngineError("the model's folder holds no tokenizer: token ids only")
    text: str = tokenizer.decode(
        list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
    )
    return text


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"{str(file)!r} cannot be read: {error}; repair or remove it") from error
    if not isinstance(value, dict):
        raise EngineError(f"{str(file)!r} holds no JSON object: repair or remove it")
    return value
