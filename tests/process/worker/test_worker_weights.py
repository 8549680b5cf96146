"""Sources of weights: found, confined, checked, read, hashed; refused with the offender's name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rollout_worker.engine import TensorEntry, TensorSpec, WeightsLayout, WeightsRejected
from rollout_worker.sources import source_reading
from rollout_worker.sources.checkpoint_files import open_source, write_manifest
from rollout_worker.sources.source_reading import ReadCancelled
from rollout_worker.weights import check_layout

TENSORS: dict[str, Any] = {
    "model.embed_tokens.weight": np.arange(12, dtype=np.float32).reshape(4, 3),
    "model.norm.weight": np.ones(3, dtype=np.float16),
    "model.scale": np.array(2.5, dtype=np.float32),
    "model.empty": np.zeros((0, 3), dtype=np.float32),
}
LAYOUT = WeightsLayout(
    required={
        "model.embed_tokens.weight": TensorSpec("F32", (4, 3)),
        "model.norm.weight": TensorSpec("F16", (3,)),
        "model.scale": TensorSpec("F32", ()),
        "model.empty": TensorSpec("F32", (0, 3)),
    },
    optional={"lm_head.weight": TensorSpec("F32", (4, 3)), "rotary.inv": TensorSpec("F32", (2,))},
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)


def publish(folder: Path, shards: int = 1, **changes: Any) -> Path:
    """Write TENSORS with changes (None: left out), in that many shards."""
    tensors = {**TENSORS, **{name.replace("__", "."): value for name, value in changes.items()}}
    kept = {name: value for name, value in tensors.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(kept, folder / "model.safetensors")
        return folder
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: names[i % shards] for i, name in enumerate(kept)}
    for shard in names:
        part = {name: kept[name] for name, where in weight_map.items() if where == shard}
        save_file(part, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def read(path: Path, layout: WeightsLayout = LAYOUT) -> tuple[dict[str, bytearray], str]:
    source = open_source(path)
    check_layout(layout, source.entries, str(path))
    kept: dict[str, bytearray] = {}

    def allocate(entry: TensorEntry) -> memoryview:
        kept[entry.name] = bytearray(entry.spec.nbytes)
        return memoryview(kept[entry.name])

    root = source_reading.read_source(source, layout.tied, allocate, lambda *_: None, lambda: False)
    return kept, root


def refused(act: Callable[[], object]) -> WeightsRejected:
    with pytest.raises(WeightsRejected) as caught:
        act()
    return caught.value


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_reads_every_byte_and_hashes_the_same_however_sharded(tmp_path: Path, shards: int) -> None:
    kept, root = read(publish(tmp_path / "w", shards))
    assert kept == {name: bytearray(value.tobytes()) for name, value in TENSORS.items()}
    assert root == read(publish(tmp_path / "one"))[1]
    assert root.startswith("xxh3_128_tree:")


def test_a_single_file_is_a_source(tmp_path: Path) -> None:
    folder = publish(tmp_path / "w")
    assert read(folder / "model.safetensors")[1] == read(folder)[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"model__scale": np.array(2.6, dtype=np.float32)},
        {"model__norm__weight": np.ones(3, dtype=np.float32)},
        {"model__embed_tokens__weight": TENSORS["model.embed_tokens.weight"].reshape(3, 4)},
        {"model__extra": np.zeros(1, dtype=np.float32)},
        {"model__norm__weight": None},
    ],
    ids=["value", "dtype", "shape", "extra", "missing"],
)
def test_other_content_has_another_hash(tmp_path: Path, changes: dict[str, Any]) -> None:
    other = publish(tmp_path / "other", **changes)
    assert write_manifest(other) != write_manifest(publish(tmp_path / "w"))


def test_a_tied_head_may_be_written_or_left_out(tmp_path: Path) -> None:
    plain = publish(tmp_path / "plain")
    head = publish(tmp_path / "head", lm_head__weight=TENSORS["model.embed_tokens.weight"])
    assert read(plain)[1] == read(head)[1]
    other = publish(tmp_path / "other", lm_head__weight=np.ones((4, 3), dtype=np.float32))
    error = refused(lambda: read(other))
    assert error.tensor == "lm_head.weight"
    assert "model.embed_tokens.weight" in str(error)
    assert write_manifest(other) != write_manifest(head) == write_manifest(plain)


@pytest.mark.parametrize(
    ("changes", "tensor", "words"),
    [
        ({"model__norm__weight": None}, "model.norm.weight", "missing"),
        ({"model__bogus": np.ones(1, dtype=np.float32)}, "model.bogus", "unknown to the model"),
        (
            {
                "model__norm__weight": None,
                "wrapped__model__norm__weight": np.ones(3, dtype=np.float16),
            },
            "model.norm.weight",
            "'wrapped.model.norm.weight' is there: publish without the prefix 'wrapped.'",
        ),
        (
            {"mlp__experts__down_proj": np.ones(1, dtype=np.float32)},
            "mlp.experts.down_proj",
            "it holds all experts of a layer, which the model's checkpoint has one by one",
        ),
        (
            {"model__norm__weight": np.ones(4, dtype=np.float16)},
            "model.norm.weight",
            "wrong shape: it is F16 [4], the model's checkpoint has F16 [3]",
        ),
        (
            {"model__norm__weight": np.ones(3, dtype=np.float32)},
            "model.norm.weight",
            "wrong dtype: it is F32 [3], the model's checkpoint has F16 [3]",
        ),
        ({"rotary__inv": np.ones(3, dtype=np.float32)}, "rotary.inv", "wrong shape"),
    ],
    ids=["missing", "unknown", "prefix", "fused", "shape", "dtype", "optional"],
)
def test_misfits_name_the_tensor(
    tmp_path: Path, changes: dict[str, Any], tensor: str, words: str
) -> None:
    error = refused(lambda: read(publish(tmp_path / "w", **changes)))
    assert error.tensor == tensor
    assert words in str(error)
    assert tensor in str(error)


def test_optional_tensors_may_be_there(tmp_path: Path) -> None:
    read(publish(tmp_path / "w", rotary__inv=np.ones(2, dtype=np.float32)))


@given(keep=st.floats(0, 1, exclude_max=True))
def test_truncated_files_are_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, keep: float
) -> None:
    folder = publish(tmp_path_factory.mktemp("cut") / "w")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * keep)])
    error = refused(lambda: open_source(folder))
    assert str(file) in str(error)
    assert "truncated" in str(error)


@given(junk=st.binary(max_size=200))
def test_junk_is_refused_and_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("junk")
    length = len(junk).to_bytes(8, "little")
    for content in (junk, length + junk, length + junk + b"\0" * 8):
        (folder / "model.safetensors").write_bytes(content)
        try:
            source = open_source(folder)
        except WeightsRejected:
            continue
        assert source.entries == ()  # an empty header is one


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}},
        {"a": {"dtype": "Q7", "shape": [2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}},
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        },
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": 3},
        [1],
    ],
    ids=["size", "negative", "dtype", "hole", "overlap", "offsets", "entry", "list"],
)
def test_lying_headers_are_refused(tmp_path: Path, header: Any) -> None:
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0" * 8)
    assert "model.safetensors" in str(refused(lambda: open_source(tmp_path)))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "not JSON"),
        ("[]", "no JSON object"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": "../elsewhere.safetensors"}}', "not a file of this folder"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "not a file of this folder"),
        ('{"weight_map": {"a": "model.safetensors"}}', "in no file"),
    ],
    ids=["text", "list", "empty", "outside", "gone", "unlisted"],
)
def test_bad_indices_are_refused(tmp_path: Path, index: str, words: str) -> None:
    publish(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert words in str(refused(lambda: open_source(tmp_path)))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    save_file({"a": np.ones(1)}, tmp_path / "x.safetensors")
    save_file({"a": np.ones(1), "b": np.ones(1)}, tmp_path / "y.safetensors")
    assert refused(lambda: open_source(tmp_path)).tensor == "a"


def test_nothing_there_is_refused(tmp_path: Path) -> None:
    assert "no *.safetensors" in str(refused(lambda: open_source(tmp_path)))
    os.mkfifo(tmp_path / "model.safetensors")
    assert "not a regular file" in str(refused(lambda: open_source(tmp_path)))


def test_a_manifest_is_checked(tmp_path: Path) -> None:
    folder = publish(tmp_path / "w")
    root = write_manifest(folder)
    assert read(folder)[1] == root
    publish(folder, model__scale=np.array(9, dtype=np.float32))  # same layout, other bytes
    error = refused(lambda: read(folder))
    assert error.tensor == "model.scale"
    assert "its manifest says" in str(error)
    body = json.loads((folder / "manifest.json").read_text())
    body["tensors"].pop("model.scale")
    (folder / "manifest.json").write_text(json.dumps(body))
    assert f"its manifest says {root}" in str(refused(lambda: read(folder)))
    (folder / "manifest.json").write_text('{"root_hash": 1}')
    assert "write_manifest" in str(refused(lambda: read(folder)))
    write_manifest(folder)
    read(folder)


def test_progress_and_cancellation(tmp_path: Path) -> None:
    source = open_source(publish(tmp_path / "w"))
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))

    source_reading.read_source(source, {}, lambda _: None, progress, lambda: False)
    assert seen[0] == (0, source.bytes_total)
    assert seen[-1] == (source.bytes_total, source.bytes_total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    with pytest.raises(ReadCancelled):
        source_reading.read_source(source, {}, lambda _: None, progress, lambda: True)


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    folder = publish(tmp_path / "w")
    source = open_source(folder)
    os.truncate(folder / "model.safetensors", source.places[source.entries[0].name].offset)
    error = refused(
        lambda: source_reading.read_source(source, {}, lambda _: None, lambda *_: None, bool)
    )
    assert "ends within tensor" in str(error)


def test_a_linked_shard_leads_out_of_no_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", publish(tmp_path / "outside")
    (root / "v1").mkdir(parents=True)
    (root / "v1" / "model.safetensors").symlink_to(outside / "model.safetensors")
    assert open_source(root / "v1")
    error = refused(lambda: open_source(root / "v1", roots=(root,)))
    assert "leads out" in str(error)
    assert str(root) in str(error)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors.index.json"])
def test_what_is_beside_the_shards_leads_out_of_no_root(tmp_path: Path, name: str) -> None:
    root = publish(tmp_path / "root" / "v1").parent
    (tmp_path / name).write_text("{}")
    (root / "v1" / name).symlink_to(tmp_path / name)
    assert "leads out" in str(refused(lambda: open_source(root / "v1", roots=(root,))))


def test_a_folder_that_becomes_a_link_leads_out_of_no_root(tmp_path: Path) -> None:
    """It was none when its path was looked at."""
    root, outside = tmp_path / "root", publish(tmp_path / "outside")
    root.mkdir()
    (root / "v1").symlink_to(outside)
    assert "leads out" in str(refused(lambda: open_source(root / "v1", roots=(root,))))


def test_links_within_a_root_are_fine(tmp_path: Path) -> None:
    publish(tmp_path / "root" / "v1")
    (tmp_path / "root" / "latest").symlink_to("v1")
    assert open_source(tmp_path / "root" / "latest", roots=(tmp_path / "root",))


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    assert "gone' does not exist" in str(refused(lambda: open_source(tmp_path / "gone")))
