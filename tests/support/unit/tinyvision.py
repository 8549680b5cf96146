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
            whole = picture if picture.dim() == 3 else picture[None]
            time, height, width = whole.shape
            grids.append((time, height // PATCH, width // PATCH))
            cut = whole.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
            patches.append(cut.reshape(-1, PATCH * PATCH))
        return torch.cat(patches), torch.tensor(grids)


class TinyProcessor:
    """What a trainer hands over for a multimodal model.

    Attributes:
        seen: How many pictures and videos each call got.
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
        self, text: list[str], images: Any = (), videos: Any = (), **options: Any
    ) -> dict[str, torch.Tensor]:
        """Return ids with expanded placeholders, the media's tensors, and keys that are no media."""
        assert options == {"return_tensors": "pt", "add_special_tokens": False}
        self.seen.append(len(images) + len(videos))
        found: dict[str, torch.Tensor] = {}
        whole = text[0]
        for pad, items, names in (
            ("<|image_pad|>", images, ("pixel_values", "image_grid_thw")),
            ("<|video_pad|>", videos, ("pixel_values_videos", "video_grid_thw")),
        ):
            if items:
                found |= dict(zip(names, self.image_processor(items), strict=True))
                runs = [pad * int(n) for n in found[names[1]].prod(-1) // MERGE**2]
                pieces = whole.split(pad)
                whole = "".join(a + b for a, b in zip(pieces, [*runs, ""], strict=True))
        ids = torch.tensor([self.tokenizer.encode(whole, add_special_tokens=False)])
        extra = {"mm_token_type_ids": torch.zeros_like(ids), "token_type_ids": torch.ones_like(ids)}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **extra, **found}


def picture(height: int, width: int, time: int = 1) -> torch.Tensor:
    """Return a picture, or a video, that differs from others of its size."""
    return torch.rand(time, height * PATCH, width * PATCH)
