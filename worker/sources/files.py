"""Safetensors files: which ones make up a source, and what their headers say.

Headers only: `open_source` proves that every file is whole (its size is what its header promises)
without touching the tensors' bytes; `weights.py` reads and hashes those.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_worker.engine import WeightsRejected

MAX_HEADER_BYTES = 100 << 20
"""Largest safetensors header, as the format's own library has it."""

SINGLE, INDEX, MANIFEST = "model.safetensors", "model.safetensors.index.json", "manifest.json"
HASH = "xxh3_128"
"""The content hash, and its key in a manifest."""

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype (safetensors' name, such as `BF16`) and shape of one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies."""

    name: str
    spec: TensorSpec
    file: Path
    offset: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of a folder's `manifest.json`."""

    root_hash: str
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Source:
    """An opened source: its headers were read and are sound, its bytes were not."""

    path: Path
    entries: tuple[Entry, ...]
    manifest: Manifest | None

    @property
    def bytes_total(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.spec.nbytes for entry in self.entries)


def open_source(path: Path, *, roots: Sequence[Path] = (), manifest: bool = True) -> Source:
    """Read the headers below `path` and check that every file is whole.

    Raises:
        WeightsRejected: no safetensors there, a broken or truncated file, a tensor given twice.
    """
    try:
        for file in (path / INDEX, path / MANIFEST):
            confined(file, roots)
        files, listed = _files_of(path)
        entries: dict[str, Entry] = {}
        for file in files:
            for entry in _read_header(confined(file, roots)):
                if entry.name in entries:
                    raise WeightsRejected(
                        f"tensor {entry.name!r} is in two files of {str(path)!r}: keep one",
                        tensor=entry.name,
                    )
                entries[entry.name] = entry
        for name in listed:
            if name not in entries:
                raise WeightsRejected(
                    f"tensor {name!r} is listed in {INDEX!r} of {str(path)!r} but in no file",
                    tensor=name,
                )
        promised = _read_manifest(path / MANIFEST) if manifest and path.is_dir() else None
    except OSError as error:
        raise WeightsRejected(f"cannot read {str(path)!r}: {error}") from error
    return Source(path, tuple(entries[name] for name in sorted(entries)), promised)


def _files_of(path: Path) -> tuple[list[Path], Sequence[str]]:
    """Return the safetensors files of a source and the names that its index promises."""
    if not path.is_dir():
        return [path], ()
    if (path / INDEX).exists():
        weight_map = _load_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsRejected(f"{str(path / INDEX)!r} has no weight_map: publish it again")
        shards = sorted({str(shard) for shard in weight_map.values()})
        for shard in shards:
            if Path(shard).name != shard or not (path / shard).is_file():
                raise WeightsRejected(
                    f"{str(path / INDEX)!r} names the shard {shard!r}, which is not a file beside "
                    "it: publish all shards"
                )
        return [path / shard for shard in shards], tuple(weight_map)
    if (path / SINGLE).exists():
        return [path / SINGLE], ()
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise WeightsRejected(f"{str(path)!r} holds no *.safetensors file: point to a checkpoint")
    return files, ()


def _load_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise WeightsRejected(f"{str(file)!r} is not JSON: publish it again") from error
    if not isinstance(value, dict):
        raise WeightsRejected(f"{str(file)!r} holds no JSON object: publish it again")
    return value


def _read_header(file: Path) -> list[Entry]:
    if not file.is_file():
        raise broken(file, "it is no regular file")
    with file.open("rb") as stream:
        size = file.stat().st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise broken(file, "its header is cut off or is none")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        found = [_entry(name, fields, file, 8 + length) for name, fields in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise broken(file, "its header is not one") from error
    end = 8 + length
    for entry in sorted(found, key=lambda entry: (entry.offset, entry.spec.nbytes)):
        if entry.offset != end:
            raise broken(file, f"tensor {entry.name!r} does not begin where the former ends")
        end += entry.spec.nbytes
    if end != size:
        raise broken(file, f"it has {size} bytes, its header promises {end}")
    return found


def _entry(name: str, fields: Mapping[str, Any], file: Path, base: int) -> Entry:
    spec = TensorSpec(str(fields["dtype"]), tuple(int(size) for size in fields["shape"]))
    begin, end = (int(offset) for offset in fields["data_offsets"])
    if min((*spec.shape, begin), default=begin) < 0 or end - begin != spec.nbytes:
        raise ValueError(f"tensor {name!r} has {end - begin} bytes for {spec}")
    return Entry(name, spec, file, base + begin)


def broken(file: Path, why: str) -> WeightsRejected:
    """Return the error for a file that is not whole."""
    return WeightsRejected(
        f"{str(file)!r} is truncated or no safetensors file: {why}; publish it again under a new "
        "path"
    )


def _read_manifest(file: Path) -> Manifest | None:
    if not file.exists():
        return None
    value = _load_json(file)
    try:
        digests = {str(name): str(hashes[HASH]) for name, hashes in value["tensors"].items()}
        return Manifest(str(value["root_hash"]), digests)
    except (KeyError, TypeError, AttributeError) as error:
        raise WeightsRejected(
            f"{str(file)!r} must hold root_hash and tensors.<name>.{HASH}: write it with "
            "rollout_worker.weights.write_manifest"
        ) from error


def confined(path: Path, roots: Sequence[Path]) -> Path:
    """Follow all links of `path`; refuse one that leads out of every root (none: anything goes)."""
    real = path.resolve()
    if roots and not any(real.is_relative_to(root.resolve()) for root in roots):
        below = " or ".join(repr(str(root)) for root in roots)
        raise WeightsRejected(
            f"{str(path)!r} leads out of the weights' folders: stay below {below}"
        )
    return real
