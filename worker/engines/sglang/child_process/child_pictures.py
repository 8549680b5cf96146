"""The child's side of pictures: it keeps them, and makes SGLang's multimodal inputs of them.

SGLang's own processors are left out. They find pictures by placeholders and marks in the ids, wait forever where these do not
fit, and for LLaVA round pixels to float16; the worker has checked and placed all of them.
"""

from __future__ import annotations

import base64
import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path

from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)
from torch import Tensor
from transformers import AutoConfig

from rollout_worker.engines.picture_model import PictureInputs, PlacedPicture, load_picture_model
from rollout_worker.engines.picture_positions import grid_positions
from rollout_worker.engines.recent_values import RecentValues
from rollout_worker.engines.sglang.scheduling import KEPT_BYTES
from rollout_worker.pictures.picture import Picture


class ChildPictures:
    """The pictures that the worker has sent, and what the model's processor makes of them."""

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        self._model = load_picture_model(folder, config)
        self._kept = RecentValues[str, Picture](KEPT_BYTES, lambda picture: len(picture.pixels))
        if self._model is not None:
            self._inputs = PictureInputs(self._model)
            # The first picture takes seconds of imports, in which a request would count as hung.
            self._model.process_picture(Picture("", 64, 64, bytes(3 * 64 * 64)))

    def use_pictures(self, refs: list[str]) -> None:
        """Mark pictures as used, as the worker has."""
        self._kept.use_values(refs)

    def keep_picture(self, ref: str, width: int, height: int, pixels: str) -> None:
        """Keep a picture, and drop those that the worker has dropped."""
        self._kept.find_or_make(ref, lambda: Picture(ref, width, height, base64.b64decode(pixels)))

    def place_pictures(self, placed: Sequence[tuple[str, int, int]]) -> list[PlacedPicture]:
        """Return the pictures of a request, given `(ref, offset, length)` of each; all were kept before it."""
        return [
            PlacedPicture(self._kept.value_of(ref), offset, length)
            for ref, offset, length in placed
        ]

    def make_inputs(
        self, ids: Sequence[int], placed: Sequence[PlacedPicture], weights: str
    ) -> MultimodalProcessorOutput:
        """Return SGLang's inputs for a prompt; blocks. `weights` name those that make the output."""
        model = self._model
        assert model is not None, "the worker sends pictures only to a model that takes them"
        made = [self._inputs.inputs_of(each.picture) for each in placed]
        items = [_make_item(*each, weights) for each in zip(placed, made, strict=True)]
        padded = array("q", ids)
        for each, item in zip(placed, items, strict=True):
            padded[each.offset : each.offset + each.length] = array(
                "q", item.padding_sequence(each.length)
            )
        found = MultimodalProcessorOutput(
            mm_items=items,
            input_ids=list(ids),
            padded_input_ids=padded.tolist(),
            im_token_id=model.pad_id,
        )
        if model.apart:
            grids = [each["image_grid_thw"][0].tolist() for each in made]
            merge = model.processor.merge_size
            found.mrope_positions, shift = grid_positions(len(ids), placed, grids, merge)
            found.mrope_position_delta = found.mrope_positions.new_tensor([[shift]])
        return found


def _make_item(placed: PlacedPicture, made: dict[str, Tensor], weights: str) -> MultimodalDataItem:
    about = {name: value for name, value in made.items() if name != "pixel_values"}
    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        feature=made["pixel_values"],
        offsets=[(placed.offset, placed.offset + placed.length - 1)],
        # LLaVA's model asks for sizes, and passes them on to a vision part that needs none.
        model_specific_data={
            **about,
            "image_sizes": [(placed.picture.width, placed.picture.height)],
        },
    )
    # By this SGLang finds KV and features: of the picture's content, and of the weights, by which features are computed.
    item.set_identity(hashlib.sha256(f"{placed.picture.ref} {weights}".encode()).digest())
    return item
