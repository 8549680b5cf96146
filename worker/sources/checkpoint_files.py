"""Safetensors files as a source of weights: found, opened, read, hashed, checked; whole.

A source is a folder (one `model.safetensors`, an index with shards, or any `*.safetensors`) or one
file. Opening it reads headers only, which prove that every file is whole. Bytes are read in chunks,
never by memory mapping: what was read stays readable when the file goes. A folder may carry
`manifest.json`, written last by whoever publishes it::

    {"root_hash": "xxh3_128:<32 hex>", "tensors": {"<name>": {"xxh3_128": "<32 hex>"}}}

and is then checked against it. Every refusal is a `WeightsRejected` that names the tensor or the
file and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from rollout_worker.engine import TensorEntry, TensorSpec, WeightsRejected
from rollout_worker.weights import HASH, check_tied_weights, compute_root_hash

MAX_HEADER_BYTES = 100 << 20
"""Largest safetensors header, as the format's own library has it."""

CHUNK_BYTES = 1 << 20
"""What is read at once: it is still in the processor's cache when it is hashed. Also the bytes between
two looks at progress and cancellation: some milliseconds of any disk."""

SINGLE, INDEX, MANIFEST = "model.safetensors", "model.safetensors.index.json", "manifest.json"

Allocate = Callable[[TensorEntry], memoryview | None]
"""As `Sink.allocate`."""

Report = Callable[[int, int], None]
"""Told (bytes done, bytes in all), in the thread that reads."""

Found = dict[str, tuple[TensorEntry, "TensorOffset"]]


class ReadCancelled(Exception):
    """The caller's `cancelled` said so; nothing was kept."""


@dataclass(frozen=True, slots=True)
class TensorOffset:
    """Where one tensor's bytes begin."""

    file: Path
    offset: int


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """Content of a folder's `manifest.json`."""

    root_hash: str
    digests: Mapping[str, str]


class WholeVersion:
    """A version all of whose bytes are read here; see `ReadableSource`."""

    __slots__ = ()
    skipped_names: frozenset[str] = frozenset()

    def promised_hashes(self) -> Mapping[str, str]:
        """See `ReadableSource.promised_hashes`: nothing is left out."""
        return {}


@dataclass(frozen=True, slots=True)
class FileSource(WholeVersion):
    """An opened source: its headers were read and are sound, its bytes were not."""

    path: Path
    entries: tuple[TensorEntry, ...]
    places: Mapping[str, TensorOffset]
    manifest: WeightsManifest | None

    @property
    def bytes_total(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.spec.nbytes for entry in self.entries)

    def read_chunks(
        self, entry: TensorEntry, view: memoryview | None, cancelled: Callable[[], bool]
    ) -> Iterator[memoryview]:
        """See `ReadableSource.read_chunks`."""
        return _read_chunks(entry, self.places[entry.name], view)

    def check_promise(self, digests: Mapping[str, str], root: str) -> None:
        """See `ReadableSource.check_promise`: its manifest, if it has one."""
        _check_manifest(self, digests, root)


class ReadableSource(Protocol):
    """A version whose bytes can be read: of files, or of a sender."""

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Its tensors, in the order of their names."""
        ...

    @property
    def bytes_total(self) -> int:
        """Bytes of all tensors that are read."""
        ...

    @property
    def skipped_names(self) -> frozenset[str]:
        """Names of the tensors whose bytes aren't read: nobody needs them here."""
        ...

    def promised_hashes(self) -> Mapping[str, str]:
        """Return the hashes of those, as their sender says; waits for its word.

        They go into the root hash, so a wrong one is another root hash than everybody else's.
        """
        ...

    def read_chunks(
        self, entry: TensorEntry, view: memoryview | None, cancelled: Callable[[], bool]
    ) -> Iterator[memoryview]:
        """Fill `view` with the tensor's bytes, yielding each part; without one, yield and forget.

        A source that waits for its bytes asks `cancelled` meanwhile.
        """
        ...

    def check_promise(self, digests: Mapping[str, str], root: str) -> None:
        """Refuse what is not what was promised, once everything is read.

        Raises:
            WeightsRejected: names the tensor.
        """
        ...


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
        files, listed = _find_files(path)
        found = _read_entries(path, [_resolve_confined(file, roots) for file in files], listed)
        promised = _read_manifest(path / MANIFEST) if manifest and path.is_dir() else None
    except OSError as error:
        raise WeightsRejected(f"cannot read {str(path)!r}: {error}") from error
    entries = tuple(entry for _, (entry, _) in sorted(found.items()))
    return FileSource(path, entries, {name: place for name, (_, place) in found.items()}, promised)


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
                why = f"names the shard {shard!r}, which is not a file beside it"
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
    """Return the tensors of a file and where each begins in it."""
    if not file.is_file():
        raise _broken_file(file, "it is no regular file")
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
    try:
        digests = {str(name): str(hashes[HASH]) for name, hashes in value["tensors"].items()}
        return WeightsManifest(str(value["root_hash"]), digests)
    except (KeyError, TypeError, AttributeError) as error:
        raise WeightsRejected(
            f"{str(file)!r} must hold root_hash and tensors.<name>.{HASH}: write it with "
            "rollout_worker.sources.checkpoint_files.write_manifest"
        ) from error


def _resolve_confined(path: Path, roots: Sequence[Path]) -> Path:
    """Follow all links of `path`; refuse one that leads out of every root (none: anything goes)."""
    real = path.resolve()
    if roots and not any(real.is_relative_to(root.resolve()) for root in roots):
        below = " or ".join(repr(str(root)) for root in roots)
        why = f"{str(path)!r} leads out of the weights' folders"
        raise WeightsRejected(f"{why}: stay below {below}")
    return real


def read_source(
    source: ReadableSource,
    tied: Mapping[str, str],
    allocate: Allocate,
    report: Report,
    cancelled: Callable[[], bool],
) -> str:
    """Read all tensors that aren't left out into the buffers of `allocate`, check ties and manifest.

    Returns the root hash of the whole version.

    Blocks; call it in a thread. `tied`: as `WeightsLayout.tied`. `cancelled` is asked between chunks.

    Raises:
        WeightsRejected: a file changed or ended early, a hash differs.
        ReadCancelled: `cancelled` returned True.
    """
    done, total = 0, source.bytes_total
    report(0, total)

    def advance(count: int) -> None:
        nonlocal done
        if cancelled():
            raise ReadCancelled
        done += count
        report(done, total)

    digests = _digest_tensors(source, allocate, advance, cancelled)
    digests.update(source.promised_hashes())
    check_tied_weights(tied, digests)
    root = compute_root_hash(source.entries, digests)
    source.check_promise(digests, root)
    return root


def _digest_tensors(
    source: ReadableSource,
    allocate: Allocate,
    advance: Callable[[int], None],
    cancelled: Callable[[], bool] = lambda: False,
) -> dict[str, str]:
    digests: dict[str, str] = {}
    for entry in source.entries:
        view = allocate(entry)
        if entry.name in source.skipped_names:
            if view is not None:  # never serve what nobody has written
                why = f"the bytes of tensor {entry.name!r} are left out, but the engine needs them"
                raise WeightsRejected(why, tensor=entry.name)
            continue
        digest = xxhash.xxh3_128()
        with memoryview(b"") if view is None else view:  # a traceback would hold on to it
            for chunk in source.read_chunks(entry, view, cancelled):
                digest.update(chunk)
                advance(len(chunk))
        digests[entry.name] = digest.hexdigest()
    return digests


def _read_chunks(
    entry: TensorEntry, place: TensorOffset, view: memoryview | None
) -> Iterator[memoryview]:
    """Fill `view` with the tensor's bytes, yielding each part; without one, yield and forget."""
    size, begin = entry.spec.nbytes, 0
    scratch = memoryview(bytearray(min(size, CHUNK_BYTES) if view is None else 0))
    try:
        with place.file.open("rb", buffering=0) as stream:
            stream.seek(place.offset)
            while begin < size:
                want = min(CHUNK_BYTES, size - begin)
                with scratch[:want] if view is None else view[begin : begin + want] as part:
                    if not (count := stream.readinto(part)):
                        raise _broken_file(place.file, f"it ends within tensor {entry.name!r}")
                    with part[:count] as chunk:
                        yield chunk
                begin += count
    except OSError as error:
        why = f"cannot read tensor {entry.name!r} from {str(place.file)!r}: {error}"
        raise WeightsRejected(why, tensor=entry.name) from error


def _check_manifest(source: FileSource, digests: Mapping[str, str], root: str) -> None:
    if source.manifest is None:
        return
    for name, want in source.manifest.digests.items():
        if digests.get(name) != want:
            why = f"has {HASH} {digests.get(name, 'missing')}, its manifest says {want}"
            raise WeightsRejected(
                f"tensor {name!r} of {str(source.path)!r} {why}: publish it again under a new path",
                tensor=name,
            )
    if source.manifest.root_hash != root:
        why = f"has root_hash {root}, its manifest says {source.manifest.root_hash}"
        raise WeightsRejected(f"{str(source.path)!r} {why}: publish it again under a new path")


def write_manifest(folder: Path) -> str:
    """Hash a folder, write its `manifest.json` (atomically, replacing one) and return root_hash."""
    source = open_source(folder, manifest=False)
    digests = _digest_tensors(source, lambda _: None, lambda _: None)
    root = compute_root_hash(source.entries, digests)
    body = {"root_hash": root, "tensors": {name: {HASH: value} for name, value in digests.items()}}
    partial = folder / f".{MANIFEST}.partial"
    partial.write_text(json.dumps(body, indent=1) + "\n")
    partial.replace(folder / MANIFEST)
    return root
