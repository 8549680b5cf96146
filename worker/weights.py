"""Safetensors as a source of weights: find, check, read and hash them; no torch in here.

A source is a folder (one `model.safetensors`, an index with shards, or any `*.safetensors`) or one
file. Engines open it (headers only), check its names, shapes and dtypes against the model's
checkpoint, and read the bytes in chunks into buffers of their own, never by memory mapping: what
was read stays readable when the file goes, and memory given back is really given back.

Every tensor has a content hash (XXH3-128 of its bytes). `root_hash` is the hash over the ordered
(name, dtype, shape, content hash), so the same content has the same hash however it is sharded.
A folder may carry `manifest.json`, written last by whoever publishes it::

    {"root_hash": "xxh3_128:<32 hex>", "tensors": {"<name>": {"xxh3_128": "<32 hex>"}}}

and is then checked against it. `write_manifest` makes one. Every refusal is a `WeightsRejected`
that names the tensor or the file and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from .engine import StageProgress, WeightsRejected
from .schemas import WeightsSource
from .sources.files import HASH, MANIFEST, Entry, Source, TensorSpec, broken, confined, open_source

CHUNK_BYTES = 8 << 20
"""Bytes between two looks at progress and cancellation: some milliseconds of any disk."""

OUTPUT_HEAD = "lm_head.weight"

Allocate = Callable[[Entry], memoryview | None]
"""Gives the buffer of exactly the tensor's size, or None if its values are not needed."""


class ReadCancelled(Exception):
    """The caller's `cancelled` said so; nothing was kept."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a model's weights look like in a checkpoint.

    `required` must be there; `optional` may be (a tied output head, buffers that the model makes
    itself). `tied` maps such a head to the tensor that it must equal.
    """

    required: Mapping[str, TensorSpec]
    optional: Mapping[str, TensorSpec]
    tied: Mapping[str, str]

    def check(self, source: Source) -> None:
        """Refuse a source with a missing, unexpected, ill-shaped or ill-typed tensor."""
        have = {entry.name: entry.spec for entry in source.entries}
        for name, want in self.required.items():
            if name not in have:
                raise WeightsRejected(
                    f"tensor {name!r} is missing in {str(source.path)!r}: publish every tensor "
                    "of the model's checkpoint",
                    tensor=name,
                )
            _check_spec(name, have[name], want)
        for name, spec in have.items():
            if name in self.required:
                continue
            if name not in self.optional:
                raise WeightsRejected(
                    f"tensor {name!r} in {str(source.path)!r} is unknown to the model: publish "
                    "the tensors of the model's checkpoint under its names and nothing else",
                    tensor=name,
                )
            _check_spec(name, spec, self.optional[name])

    def check_ties(self, digests: Mapping[str, str]) -> None:
        """Refuse a tied tensor that differs from the one it is tied to."""
        for name, target in self.tied.items():
            if name in digests and digests[name] != digests[target]:
                raise WeightsRejected(
                    f"tensor {name!r} differs from {target!r}, but the model ties the two: leave "
                    f"{name!r} out or publish equal bytes",
                    tensor=name,
                )


def _check_spec(name: str, have: TensorSpec, want: TensorSpec) -> None:
    if have != want:
        what = "shape" if have.dtype == want.dtype else "dtype"
        raise WeightsRejected(
            f"tensor {name!r} has the wrong {what}: it is {have}, the model's checkpoint has "
            f"{want}; publish it as {want}",
            tensor=name,
        )


def locate(source: WeightsSource, *, checkpoint: Path, roots: Sequence[Path]) -> Path:
    """Return the absolute path of a source.

    With `roots` it must lie below one of them after all links are followed, and a relative path
    is taken below the last one; without, any absolute path goes.
    """
    if source.path is None:
        return checkpoint
    path = Path(source.path)
    if not path.is_absolute():
        if not roots:
            raise WeightsRejected(f"source.path {source.path!r} is relative: give an absolute path")
        path = roots[-1] / path
    if not path.exists():
        raise WeightsRejected(f"source.path {str(path)!r} does not exist: check path and mounts")
    return confined(path, roots)


def read(
    source: Source,
    layout: Layout,
    allocate: Allocate,
    progress: StageProgress,
    cancelled: Callable[[], bool],
) -> str:
    """Read all tensors into the buffers of `allocate`, check ties and manifest; return root_hash.

    Blocks; call it in a thread. `cancelled` is asked between chunks.

    Raises:
        WeightsRejected: a file changed or ended early, a hash differs.
        ReadCancelled: `cancelled` returned True.
    """
    done, total = 0, source.bytes_total
    progress(0, total)

    def advance(count: int) -> None:
        nonlocal done
        if cancelled():
            raise ReadCancelled
        done += count
        progress(done, total)

    digests = _digest_all(source, allocate, advance)
    layout.check_ties(digests)
    root = root_hash({entry.name: entry.spec for entry in source.entries}, digests)
    _check_manifest(source, digests, root)
    return root


def _digest_all(
    source: Source, allocate: Allocate, advance: Callable[[int], None]
) -> dict[str, str]:
    digests: dict[str, str] = {}
    for entry in source.entries:
        view = allocate(entry)
        digest = xxhash.xxh3_128()
        for chunk in _chunks(entry, view):
            digest.update(chunk)
            advance(len(chunk))
        digests[entry.name] = digest.hexdigest()
    return digests


def _chunks(entry: Entry, view: memoryview | None) -> Iterator[memoryview]:
    """Fill `view` with the tensor's bytes, yielding each part; without one, yield and forget."""
    size, begin = entry.spec.nbytes, 0
    scratch = memoryview(bytearray(min(size, CHUNK_BYTES) if view is None else 0))
    try:
        with entry.file.open("rb", buffering=0) as stream:
            stream.seek(entry.offset)
            while begin < size:
                want = min(CHUNK_BYTES, size - begin)
                part = scratch[:want] if view is None else view[begin : begin + want]
                count = stream.readinto(part)
                if not count:
                    raise broken(entry.file, f"it ends within tensor {entry.name!r}")
                yield part[:count]
                begin += count
    except OSError as error:
        raise WeightsRejected(
            f"cannot read tensor {entry.name!r} from {str(entry.file)!r}: {error}",
            tensor=entry.name,
        ) from error


def root_hash(specs: Mapping[str, TensorSpec], digests: Mapping[str, str]) -> str:
    """Return the hash of a whole set of tensors; independent of sharding and order.

    An output head that equals another tensor (the embedding it is tied to) does not count, so it
    may be left out or written.
    """
    head = (specs.get(OUTPUT_HEAD), digests.get(OUTPUT_HEAD))
    bodies = [(specs[name], digests[name]) for name in specs if name != OUTPUT_HEAD]
    digest = xxhash.xxh3_128()
    for name in sorted(specs):
        if name == OUTPUT_HEAD and head in bodies:
            continue
        spec = specs[name]
        shape = ",".join(map(str, spec.shape))
        digest.update(f"{name}\0{spec.dtype}\0{shape}\0{digests[name]}\n".encode())
    return f"{HASH}:{digest.hexdigest()}"


def _check_manifest(source: Source, digests: Mapping[str, str], root: str) -> None:
    if source.manifest is None:
        return
    for name, want in source.manifest.digests.items():
        if digests.get(name) != want:
            have = digests.get(name, "missing")
            raise WeightsRejected(
                f"tensor {name!r} of {str(source.path)!r} has {HASH} {have}, its manifest says "
                f"{want}: publish the folder again under a new path",
                tensor=name,
            )
    if source.manifest.root_hash != root:
        raise WeightsRejected(
            f"{str(source.path)!r} has root_hash {root}, its manifest says "
            f"{source.manifest.root_hash}: publish the folder again under a new path"
        )


def write_manifest(folder: Path) -> str:
    """Hash a folder, write its `manifest.json` (atomically, replacing one) and return root_hash."""
    source = open_source(folder, manifest=False)
    digests = _digest_all(source, lambda _: None, lambda _: None)
    root = root_hash({entry.name: entry.spec for entry in source.entries}, digests)
    body = {"root_hash": root, "tensors": {name: {HASH: value} for name, value in digests.items()}}
    partial = folder / f".{MANIFEST}.partial"
    partial.write_text(json.dumps(body, indent=1) + "\n")
    partial.replace(folder / MANIFEST)
    return root
