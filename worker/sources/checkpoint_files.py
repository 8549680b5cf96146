"""Safetensors files as a source of weights: finds, opens, reads, hashes and checks them.

A source is a folder (one `model.safetensors`, an index with shards, any `*.safetensors`, or adapters as PEFT saves
them) or one file. To open it, only headers are read, which prove that every file is whole. Bytes are read leaf by leaf,
never by memory mapping: bytes that were read stay readable when the file is deleted. A folder may have a
`manifest.json`, which its publisher writes last::

    {"root_hash": "xxh3_128_tree:<32 hex>", "tensors": {"<name>": {"xxh3_128_tree": "<32 hex>"}}}

The folder is then checked against it; in a manifest of an earlier release both schemes are `xxh3_128`. Every refusal
is a `WeightsRejected` that names the tensor or the file and the fix.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from rollout_common.wire.adapters import CONFIG_KEY, TENSORS_FILE, entry_name
from rollout_common.wire.root_hash import TREE_SCHEME, scheme_of
from rollout_worker.engine import TensorEntry, TensorSpec, WeightsRejected
from rollout_worker.weights import compute_root_hash

from .adapter_folder import find_adapter_folders, read_config, version_name
from .source_reading import ContentHashes, ReadableSource, ReadLeaf, copy_leaf, hash_tensors

MAX_HEADER_BYTES = 100 << 20
"""Largest safetensors header, as the format's own library has it."""

SINGLE, INDEX, MANIFEST = "model.safetensors", "model.safetensors.index.json", "manifest.json"

Found = dict[str, tuple[TensorEntry, "TensorOffset"]]


@dataclass(frozen=True, slots=True)
class TensorOffset:
    """The file of a tensor, and where its bytes begin there."""

    file: Path
    offset: int


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """Content of a folder's `manifest.json`; `scheme`: of all its hashes."""

    root_hash: str
    digests: Mapping[str, str]
    scheme: str


@dataclass(frozen=True, slots=True)
class FileSource(ReadableSource):
    """An opened source: its headers are read and valid, its bytes are not read yet."""

    path: Path
    entries: tuple[TensorEntry, ...] = field()
    places: Mapping[str, TensorOffset]
    manifest: WeightsManifest | None
    inline: Mapping[str, bytes] = field(default_factory=dict)
    """Tensors whose bytes were made from what a file says."""

    @property
    @override
    def promised_scheme(self) -> str | None:
        """The scheme of its manifest; None: it has no manifest."""
        return None if self.manifest is None else self.manifest.scheme

    @override
    def open_tensor(
        self, entry: TensorEntry, cancelled: Callable[[], bool]
    ) -> contextlib.AbstractContextManager[ReadLeaf]:
        if (content := self.inline.get(entry.name)) is not None:
            return contextlib.nullcontext(partial(_read_inline, memoryview(content)))
        return _opened_tensor(entry, self.places[entry.name])

    @override
    def check_promise(self, found: Mapping[str, ContentHashes]) -> None:
        if self.manifest is not None:
            _check_manifest(str(self.path), self.manifest, found[self.manifest.scheme])


def open_source(path: Path, *, roots: Sequence[Path] = (), manifest: bool = True) -> FileSource:
    """Read the headers below `path` and check that every file is whole.

    Raises:
        WeightsRejected: no safetensors there, a broken or truncated file, a tensor given twice.
    """
    try:
        if not path.exists():
            raise WeightsRejected(f"{str(path)!r} does not exist: check path and mounts")
        for file in (path / INDEX, path / MANIFEST):
            _resolve_confined(file, roots)
        inline: dict[str, bytes] = {}
        folders: dict[str, Path] = {}
        if path.is_dir() and not (path / SINGLE).exists() and not (path / INDEX).exists():
            folders = find_adapter_folders(path)
        if folders:
            found = _read_adapters(folders, roots, inline)
        else:
            files, listed = _find_files(path)
            found = _read_entries(path, [_resolve_confined(file, roots) for file in files], listed)
        promised = _read_manifest(path / MANIFEST) if manifest and path.is_dir() else None
    except OSError as error:
        raise WeightsRejected(f"cannot read {str(path)!r}: {error}") from error
    configs = [TensorEntry(name, TensorSpec("U8", (len(inline[name]),))) for name in inline]
    entries = sorted([*configs, *(entry for entry, _ in found.values())], key=lambda e: e.name)
    places = {name: place for name, (_, place) in found.items()}
    return FileSource(path, tuple(entries), places, promised, inline)


def _read_adapters(
    folders: Mapping[str, Path], roots: Sequence[Path], inline: dict[str, bytes]
) -> Found:
    """Return the tensors of adapters, and add their configurations to `inline`."""
    found: Found = {}
    for name, folder in folders.items():
        confine = partial(_resolve_confined, roots=roots)
        inline[entry_name(name, CONFIG_KEY)] = read_config(name, folder, confine)
        for entry, offset in _read_header(file := confine(folder / TENSORS_FILE)):
            renamed = TensorEntry(version_name(name, entry.name), entry.spec)
            found[renamed.name] = (renamed, TensorOffset(file, offset))
    return found


def _read_entries(path: Path, files: Sequence[Path], listed: Sequence[str]) -> Found:
    found: Found = {}
    for file in files:
        for entry, offset in _read_header(file):
            if entry.name in found:
                why = f"tensor {entry.name!r} is in two files of {str(path)!r}: keep one"
                raise WeightsRejected(why, tensor=entry.name)
            found[entry.name] = (entry, TensorOffset(file, offset))
    for name in listed:
        if name not in found:
            why = f"tensor {name!r} is listed in {INDEX!r} of {str(path)!r} but in no file"
            raise WeightsRejected(why, tensor=name)
    return found


def _find_files(path: Path) -> tuple[list[Path], Sequence[str]]:
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
                why = f"names the shard {shard!r}, which is not a file of this folder"
                raise WeightsRejected(f"{str(path / INDEX)!r} {why}: publish all shards")
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


def _read_header(file: Path) -> list[tuple[TensorEntry, int]]:
    """Return the tensors of a file and the offset of each."""
    if not file.is_file():
        raise _broken_file(file, "it is not a regular file")
    with file.open("rb") as stream:
        size = file.stat().st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise _broken_file(file, "its header is cut off or missing")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        found = [_parse_entry(name, fields, 8 + length) for name, fields in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _broken_file(file, "its header is not one") from error
    end = 8 + length
    for entry, offset in sorted(found, key=lambda each: (each[1], each[0].spec.nbytes)):
        if offset != end:
            raise _broken_file(
                file, f"tensor {entry.name!r} does not begin where the previous one ends"
            )
        end += entry.spec.nbytes
    if end != size:
        raise _broken_file(file, f"it has {size} bytes, its header promises {end}")
    return found


def _parse_entry(name: str, fields: Mapping[str, Any], base: int) -> tuple[TensorEntry, int]:
    spec = TensorSpec(str(fields["dtype"]), tuple(int(size) for size in fields["shape"]))
    begin, end = (int(offset) for offset in fields["data_offsets"])
    if min((*spec.shape, begin), default=begin) < 0 or end - begin != spec.nbytes:
        raise ValueError(f"tensor {name!r} has {end - begin} bytes for {spec}")
    return TensorEntry(name, spec), base + begin


def _broken_file(file: Path, why: str) -> WeightsRejected:
    wrong = f"{str(file)!r} is truncated or not a safetensors file: {why}"
    return WeightsRejected(f"{wrong}; publish it again under a new path")


def _read_manifest(file: Path) -> WeightsManifest | None:
    if not file.exists():
        return None
    value = _load_json(file)
    scheme = TREE_SCHEME
    try:
        root = str(value["root_hash"])
        scheme = scheme_of(root)
        digests = {str(name): str(hashes[scheme]) for name, hashes in value["tensors"].items()}
        return WeightsManifest(root, digests, scheme)
    except (KeyError, TypeError, AttributeError) as error:
        raise WeightsRejected(
            f"{str(file)!r} must hold root_hash and tensors.<name>.{scheme}: write it with "
            "rollout_worker.sources.checkpoint_files.write_manifest"
        ) from error


def _resolve_confined(path: Path, roots: Sequence[Path]) -> Path:
    """Follow all links of `path`; refuse a path outside of all roots (no roots: accept every path)."""
    real = path.resolve()
    if roots and not any(real.is_relative_to(root.resolve()) for root in roots):
        below = " or ".join(repr(str(root)) for root in roots)
        why = f"{str(path)!r} leads out of the weights' folders"
        raise WeightsRejected(f"{why}: stay below {below}")
    return real


@contextlib.contextmanager
def _opened_tensor(entry: TensorEntry, place: TensorOffset) -> Iterator[ReadLeaf]:
    try:
        stream = place.file.open("rb", buffering=0)
    except OSError as error:
        raise _unreadable_tensor(entry, place, error) from error
    with stream:
        yield partial(_read_leaf, entry, place, stream.fileno())


def _read_inline(content: memoryview, begin: int, end: int, part: memoryview | None) -> memoryview:
    if part is None:
        return content[begin:end]
    return copy_leaf(content[begin:end], part)


def _read_leaf(
    entry: TensorEntry,
    place: TensorOffset,
    handle: int,
    begin: int,
    end: int,
    part: memoryview | None,
) -> memoryview:
    """Read the bytes from `begin` to `end` of a tensor into `part`, or into new memory without one; return them."""
    size, at, there = end - begin, place.offset + begin, 0
    try:
        if part is None:
            content = os.pread(handle, size, at)
            if len(content) == size:
                return memoryview(content)
            part = memoryview(bytearray(size))
        while there < size:
            with part[there:] as rest:
                count = os.preadv(handle, [rest], at + there)
            if not count:
                raise _broken_file(place.file, f"it ends within tensor {entry.name!r}")
            there += count
    except OSError as error:
        raise _unreadable_tensor(entry, place, error) from error
    return part


def _unreadable_tensor(entry: TensorEntry, place: TensorOffset, error: OSError) -> WeightsRejected:
    why = f"cannot read tensor {entry.name!r} from {str(place.file)!r}: {error}"
    return WeightsRejected(why, tensor=entry.name)


def _check_manifest(path: str, manifest: WeightsManifest, found: ContentHashes) -> None:
    for name, want in manifest.digests.items():
        if found.digests.get(name) != want:
            have = found.digests.get(name, "missing")
            why = f"has {manifest.scheme} {have}, its manifest says {want}"
            raise WeightsRejected(
                f"tensor {name!r} of {path!r} {why}: publish it again under a new path", tensor=name
            )
    if manifest.root_hash != found.root_hash:
        why = f"has root_hash {found.root_hash}, its manifest says {manifest.root_hash}"
        raise WeightsRejected(f"{path!r} {why}: publish it again under a new path")


def write_manifest(folder: Path) -> str:
    """Hash a folder, write its `manifest.json` (atomically, replacing one) and return root_hash."""
    source = open_source(folder, manifest=False)
    digests = hash_tensors(source)[TREE_SCHEME]
    root = compute_root_hash(source.entries, digests)
    tensors = {name: {TREE_SCHEME: value} for name, value in sorted(digests.items())}
    body = {"root_hash": root, "tensors": tensors}
    partial = folder / f".{MANIFEST}.partial"
    partial.write_text(json.dumps(body, indent=1) + "\n")
    partial.replace(folder / MANIFEST)
    return root
