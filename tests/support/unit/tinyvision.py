"""A small processor of the Qwen-VL kind: pictures become patches, placeholders become runs."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.unit.chatstyles import tokenizer

PATCH, MERGE = 4, 2


class TinyQwen2VLImageProcessor:
    """Cuts [T, H, W] pictures into 4 x 4 patches; the name is what tells the family."""

    merge_size = MERGE
    model_input_names = ("pixel_values", "image_grid_thw")

    def __call__(self, pictures: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return patches [sum of T*h*w, 16] and grids [count, 3]."""
        patches, grids = [], []
        for picture in pictures:
            time, height, width = picture.shape
            grids.append((time, height // PATCH, width // PATCH))
            cut = picture.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
            patches.append(cut.reshape(-1, PATCH * PATCH))
        return torch.cat(patches), torch.tensor(grids)


class TinyProcessor:
    """What a trainer hands over for a multimodal model.

    Attributes:
        seen: How many pictures each call got.
    """

    def __init__(self) -> None:
        self.tokenizer = tokenizer("qwen")
        self.image_processor = TinyQwen2VLImageProcessor()
        self.chat_template = self.tokenizer.chat_template
        self.seen: list[int] = []

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        """Render, as the tokenizer does."""
        return self.tokenizer.apply_chat_template(messages, **options)

    def __call__(
        self, text: list[str], images: list[torch.Tensor], **options: Any
    ) -> dict[str, torch.Tensor]:
        """Return ids with expanded placeholders, the media's tensors, and keys that are no media."""
        assert options == {"return_tensors": "pt", "add_special_tokens": False}
        self.seen.append(len(images))
        patches, grids = self.image_processor(images)
        runs = ["<|image_pad|>" * int(count) for count in grids.prod(-1) // MERGE**2]
        pieces = zip(text[0].split("<|image_pad|>"), [*runs, ""], strict=True)
        whole = "".join(piece + run for piece, run in pieces)
        ids = torch.tensor([self.tokenizer.encode(whole, add_special_tokens=False)])
        extra = {"mm_token_type_ids": torch.zeros_like(ids), "token_type_ids": torch.ones_like(ids)}
        found = {"pixel_values": patches, "image_grid_thw": grids}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **extra, **found}


def picture(height: int, width: int) -> torch.Tensor:
    """Return a picture that differs from others of its size."""
    return torch.rand(1, height * PATCH, width * PATCH)
