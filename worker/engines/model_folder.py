"""What all engines read from a model's folder: configuration, tokenizer, and the layout and hash of its weights."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from rollout_common.wire import Progress
from rollout_common.wire.root_hash import LEAF_BYTES
from rollout_worker.engine import EngineError, TensorEntry, WeightsLayout
from rollout_worker.sources.checkpoint_files import FileSource, open_source
from rollout_worker.sources.source_reading import ReadCancelled, Report, read_source
from rollout_worker.weights import OUTPUT_HEAD

logger = logging.getLogger(__name__)

T = TypeVar("T")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
EMBEDDING_TENSORS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
)
COMPUTED_TENSORS = ("rotary_emb.inv_freq",)
"""Old checkpoints hold them; every model computes them itself."""

DEFAULT_BATCH_TOKENS = 32768
"""A KV cache of some hundred MB for a model that a CPU can serve."""

COMPUTE_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes that a model can run in, by their names in a checkpoint."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return what the folder's config.json holds; raise `EngineError` if that is not a JSON object."""
    file = folder / "config.json"
    if not file.is_file():
        raise EngineError(f"{str(folder)!r} holds no config.json: point to a model folder")
    return _read_json(file)


def read_eos_ids(folder: Path, own: object, vocab_size: int | None = None) -> frozenset[int]:
    """Return the ids that end an output: those of generation_config.json, else `own`.

    `own`: what the model's config.json has: an id, a list of ids, or None. Ids from `vocab_size` on, as in models that
    were pruned, are left out: nobody can sample them.

    Raises:
        EngineError: the file holds no JSON object, or something else than ids.
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
    if vocab_size is None:
        return frozenset(ids)
    known = frozenset(each for each in ids if type(each) is int and 0 <= each < vocab_size)
    if len(known) < len(set(ids)):
        logger.warning(
            "eos_token_id of the model in %s is %r, and its vocabulary has %d tokens: the others never end an output",
            folder, value, vocab_size,
        )  # fmt: skip
    return known


def resolve_max_length(asked: int | None, known: int | None) -> int:
    """Return the most tokens of prompt and output together.

    `asked`: what the worker's flags say, `known`: what the model's configuration says, if anything. Raises
    `EngineError` if neither says it, or `asked` is above `known`.
    """
    if asked is None:
        if known is None:
            raise EngineError("the model's config names no maximum length: set max_length")
        return int(known)
    if known is not None and asked > known:
        raise EngineError(f"max_length {asked} is above the model's {known}: lower max_length")
    return asked


def resolve_batch_tokens(asked: int | None, longest: int) -> int:
    """Return the size of the KV cache of an engine that must bound it itself, in tokens: `asked`, or some hundred MB.

    Raises:
        EngineError: it is too small for the longest request.
    """
    tokens = asked or max(DEFAULT_BATCH_TOKENS, longest)
    if tokens < longest:
        raise EngineError(
            f"max_batch_tokens {tokens} is below the maximum length {longest}: raise it or lower max_length, else the"
            " longest request could never run"
        )
    return tokens


def load_tokenizer(folder: Path) -> Any | None:
    """Return the model's tokenizer, None if its folder holds none; blocks; raises `EngineError` for broken files."""
    # Without files transformers would make an empty tokenizer for models that it has code for.
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


def decode_tokens(tokenizer: Any | None, token_ids: Iterable[int], *, special: bool) -> str:
    """Return the exact text of token ids, or raise `EngineError` without a tokenizer; `special`: with special tokens."""
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


def checkpoint_layout(entries: Sequence[TensorEntry], *, tied: bool = False) -> WeightsLayout:
    """Return what a version must hold: the checkpoint's tensors; a tied output head is optional."""
    specs = {entry.name: entry.spec for entry in entries}
    required = {name: spec for name, spec in specs.items() if not name.endswith(COMPUTED_TENSORS)}
    optional = {name: spec for name, spec in specs.items() if name not in required}
    embedding = _find_embedding(specs)
    if not tied or embedding is None:
        return WeightsLayout(required, optional, {})
    required.pop(OUTPUT_HEAD, None)
    optional[OUTPUT_HEAD] = specs[embedding]
    return WeightsLayout(required, optional, {OUTPUT_HEAD: embedding})


def _find_embedding(names: Iterable[str]) -> str | None:
    return next((name for name in sorted(names) if name.endswith(EMBEDDING_TENSORS)), None)


def has_redundant_head(source: FileSource, cancelled: Callable[[], bool]) -> bool:
    """Return whether a checkpoint has its embedding once more, as its output head; blocks while both are read.

    Raises:
        ReadCancelled: `cancelled` returned true.
    """
    known = {entry.name: entry for entry in source.entries}
    head = known.get(OUTPUT_HEAD)
    name = _find_embedding(known)
    if head is None or name is None or known[name].spec != head.spec:
        return False
    with (
        source.open_tensor(head, cancelled) as one,
        source.open_tensor(known[name], cancelled) as other,
    ):
        for begin in range(0, head.spec.nbytes, LEAF_BYTES):
            if cancelled():
                raise ReadCancelled
            end = min(begin + LEAF_BYTES, head.spec.nbytes)
            with one(begin, end, None) as left, other(begin, end, None) as right:
                if bytes(left) != bytes(right):  # memoryviews compare one number at a time
                    return False
    return True


def checkpoint_dtype(entries: Sequence[TensorEntry]) -> str | None:
    """Return the dtype that most bytes of a checkpoint have, None if a model can run in none of its dtypes."""
    # Bytes, not tensors: a quantised checkpoint has a small float32 scale for every weight.
    found: Counter[str] = Counter()
    for entry in entries:
        if entry.spec.dtype in COMPUTE_DTYPES:
            found[COMPUTE_DTYPES[entry.spec.dtype]] += entry.spec.nbytes
    return found.most_common(1)[0][0] if found else None


def hash_checkpoint(folder: Path, report: Report, cancelled: Callable[[], bool]) -> str:
    """Return the root hash of a checkpoint; blocks while it is read, which also caches its pages.

    Raises:
        WeightsRejected: it is not whole, or not what its manifest says.
        ReadCancelled: `cancelled` returned true.
    """
    return read_source(open_source(folder), {}, lambda _: None, report, cancelled)


def start_while_hashing(
    folder: Path,
    report: Callable[[Progress], None],
    cancelled: Callable[[], bool],
    start: Callable[[], T],
    end: Callable[[T], object],
) -> tuple[T, str]:
    """Return what `start` returns, and the root hash of the checkpoint in `folder`, computed at the same time.

    If the start fails, hashing stops and the failure is raised at once; if hashing fails, `end` ends what was started.

    Raises:
        WeightsRejected: the checkpoint is not whole, or not what its manifest says.
        ReadCancelled: `cancelled` returned true.
        Exception: what `start` raised.
    """
    failed = threading.Event()

    def advance(done: int, total: int) -> None:
        if done < total:
            report(Progress(message=f"checking weights {done / total:.0%}", fraction=done / total))
        else:
            report(Progress(message="starting vLLM's processes"))

    with ThreadPoolExecutor(1) as pool:
        hashing = pool.submit(
            hash_checkpoint, folder, advance, lambda: failed.is_set() or cancelled()
        )
        try:
            started = start()
        except BaseException:
            failed.set()
            raise
        try:
            return started, hashing.result()
        except BaseException:
            end(started)
            raise
