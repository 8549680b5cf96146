"""Tiny models that see, of random weights: of Qwen2-VL's shape and of LLaVA's, with pictures and prompts for them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

from rollout_worker.pictures.picture import Picture
from rollout_worker.pictures.picture_decoding import decode_picture
from rollout_worker.sources.checkpoint_files import write_manifest
from tests.support.engine.tinymodels import TinyModels, script

PAD, VIDEO, VISION_START, VISION_END = 500, 501, 502, 503
VOCABULARY = 512
KINDS = ("qwen2_vl", "qwen2_5_vl", "llava")

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,  # heads of 32, the least that vLLM has on a CPU
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_IDS = {
    "image_token_id": PAD,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_QWEN_VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 128, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 128,
        "fullatt_block_indexes": [1],
        "window_size": 56,
    },
}


def _qwen(kind: str, tied: bool) -> Any:
    rope = {**_ROPE, "mrope_section": [4, 6, 6]}
    # SGLang reads the second name of the channels.
    vision = {"depth": 2, "num_heads": 2, "in_channels": 3, "in_chans": 3, **_QWEN_VISION[kind]}
    return transformers.CONFIG_MAPPING[kind](
        text_config={**_TEXT, "rope_parameters": rope, "tie_word_embeddings": tied},
        vision_config=vision,
        tie_word_embeddings=tied,
        **_IDS,
    )


def _llava(tied: bool) -> Any:
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "projection_dim": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    return transformers.LlavaConfig(
        text_config={"model_type": "llama", **_TEXT, "rope_parameters": _ROPE, "head_dim": 32},
        vision_config=vision,
        image_token_index=PAD,
        tie_word_embeddings=tied,
    )


def make_picture_model(
    folder: Path, kind: str, seed: int = 1, *, tied: bool = False, whole: bool = True
) -> Path:
    """Write a model: weights by a seed, and its processor; `whole`: with what a version of weights needs not."""
    config = _llava(tied) if kind == "llava" else _qwen(kind, tied)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)](config)
        with torch.no_grad():
            for name, weights in model.named_parameters():
                if weights.ndim > 1 and "norm" not in name:
                    weights.normal_(0, 0.2)
    model.save_pretrained(folder)
    if kind == "llava":
        _name_as_published(folder / "model.safetensors")
    if whole:
        _write_processor(folder, kind)
        tokenizer = script()._tokenizer(PAD)
        pad = "<image>" if kind == "llava" else "<|image_pad|>"
        tokenizer.add_special_tokens([pad, "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
        tokenizer.save(str(folder / "tokenizer.json"))
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
    write_manifest(folder)
    return folder


class PictureModels(TinyModels):
    """Folders of one kind by seed, and what transformers says of them; made once in a folder of a test's own."""

    def __init__(self, home: Path, kind: str) -> None:
        self.home, self.kind = home, kind
        self._judges: dict[int, PictureReference] = {}

    def _made(self, kind: str, seed: int) -> Path:
        folder = self.home / f"{self.kind}-{kind}-s{seed}"
        if not folder.exists():
            make_picture_model(folder, self.kind, seed, whole=kind == "model")
        return folder

    def judge(self, seed: int) -> PictureReference:
        """Return plain transformers with the weights of a seed."""
        if seed not in self._judges:
            self._judges[seed] = PictureReference(self.model(seed))
        return self._judges[seed]


def _write_processor(folder: Path, kind: str) -> None:
    if kind == "llava":
        processor = transformers.models.clip.CLIPImageProcessorPil(
            size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
        )
        about = {
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        }
        (folder / "processor_config.json").write_text(json.dumps(about))
    else:
        sizes = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}
        processor = transformers.models.qwen2_vl.Qwen2VLImageProcessorPil(size=sizes)
    processor.save_pretrained(folder)


def encoded(seed: int, width: int = 90, height: int = 60) -> bytes:
    """Return a PNG of large random squares, so that it survives a change of its size."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def picture(seed: int, width: int = 90, height: int = 60) -> Picture:
    return decode_picture(encoded(seed, width, height))


def _name_as_published(file: Path) -> None:
    """Give the vision part the names that LLaVA's checkpoints have, as an older transformers wrote them."""
    inner = "vision_tower.vision_model."
    tensors = {
        name.replace("vision_tower.", inner, 1): tensor for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)


class PictureReference:
    """A folder as transformers itself runs it: its processor, its model, its `generate`."""

    def __init__(self, folder: Path) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.processor = transformers.AutoImageProcessor.from_pretrained(str(folder))
        model: Any = transformers.AutoModelForImageTextToText.from_pretrained(str(folder))
        self.model = model.eval()
        self.never = [PAD, VIDEO] if hasattr(self.model.config, "video_token_id") else [PAD]

    def prompt(
        self, pictures: Sequence[Picture], *, before: int = 9, after: int = 8
    ) -> tuple[int, ...]:
        """Return a prompt of some tokens around expanded placeholders, each between its marks."""
        ids = [before]
        for each in pictures:
            ids += [VISION_START, *[PAD] * self.count(each), VISION_END]
        return (*ids, after, after + 1)

    def count(self, picture: Picture) -> int:
        """Return how many tokens a picture becomes, as the model's own features say."""
        with torch.no_grad():
            made = self.model.get_image_features(**self._inputs([picture]), return_dict=True)
        return sum(map(len, made.pooler_output))

    def _inputs(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        return dict(
            self.processor(images=[each.to_image() for each in pictures], return_tensors="pt")
        )

    def _prompt_inputs(self, ids: Sequence[int], pictures: Sequence[Picture]) -> dict[str, Any]:
        batch = torch.tensor([ids])
        found = self._inputs(pictures) if pictures else {}
        if pictures and self.model.config.model_type != "llava":
            found["mm_token_type_ids"] = (batch == PAD).int()
        return {"input_ids": batch, **found}

    @torch.no_grad()
    def generate(
        self,
        prompt: Sequence[int],
        pictures: Sequence[Picture],
        count: int = 12,
        *,
        masked: bool = False,
    ) -> tuple[list[int], list[float]]:
        """Return greedy ids and their logprobs; placeholders are never drawn. `masked`: the rest has their probability."""
        inputs = self._prompt_inputs(prompt, pictures)
        made = self.model.generate(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            suppress_tokens=self.never,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = made.sequences[0, len(prompt) :].tolist()
        logits = torch.cat(made.logits).float()
        if masked:
            logits[:, self.never] = -torch.inf
        rows = logits.log_softmax(-1)
        return tokens, [float(row[token]) for row, token in zip(rows, tokens, strict=True)]

    @torch.no_grad()
    def greedy_gaps(
        self, prompt: Sequence[int], pictures: Sequence[Picture], tokens: Sequence[int]
    ) -> list[float]:
        """Return how far each token's logprob lies below that of the best one after the same prefix; 0: it is the best."""
        rows = self._rows([*prompt, *tokens], pictures)[len(prompt) - 1 : -1]
        rows[:, self.never] = -torch.inf
        return [float(row.max() - row[token]) for row, token in zip(rows, tokens, strict=True)]

    @torch.no_grad()
    def score(self, prompt: Sequence[int], pictures: Sequence[Picture]) -> list[float]:
        """Return the raw logprob of each token of a prompt after those before it; of the first, 0."""
        rows = self._rows(prompt, pictures)
        return [0.0, *(float(rows[at, token]) for at, token in enumerate(prompt[1:]))]

    def _rows(self, ids: Sequence[int], pictures: Sequence[Picture]) -> torch.Tensor:
        """Return the raw logprobs after each of these ids, `[len(ids), vocabulary]`."""
        logits: torch.Tensor = self.model(**self._prompt_inputs(ids, pictures)).logits[0]
        return logits.float().log_softmax(-1)
