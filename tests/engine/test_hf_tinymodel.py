"""The script that makes tiny models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import transformers

from tests.support.engine.engines import request, run, serving
from tests.support.engine.tinymodels import SCRIPT, TinyModels, script

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")


def make(patch: pytest.MonkeyPatch, out: Path, *args: str) -> Path:
    """Run the command here: its imports take ten times as long as the rest."""
    patch.setattr(sys, "argv", [str(SCRIPT), str(out), *args])
    script().main()
    return out


def test_the_same_seed_makes_the_same_bytes(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = make(monkeypatch, tmp_path / "again", "--seed", "1")
    for name in FILES:
        assert (again / name).read_bytes() == (tiny_models.model(1) / name).read_bytes()


def test_the_tokenizer_speaks_chatml_and_every_byte(tiny_models: TinyModels) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tiny_models.model(1)))
    text = "wakeful reward: \u00e4\u20ac\U0001f680\n\t 42"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 4096
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode("<|im_end|>") == [2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_other_shapes_are_served(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--untied", "--dtype", dtype, "--layers", "1", "--hidden", "64", "--vocab", "300")
    folder = make(monkeypatch, tmp_path / "m", "--weights-only", *flags)
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    async with serving(folder) as (engine, info):
        output = await run(engine, request(prompt=(5, 6)))
        assert not engine.capabilities.stop_strings
    assert info.layout.required["model.embed_tokens.weight"].shape == (300, 64)
    assert len(output.token_ids) == 8
