"""The pictures of running outputs: what the vision part makes of them, and the positions of their tokens.

A picture's features are computed when the first output reads it, and kept by picture and weights: the samples
of one prompt share them, and after an update they are made again. Everything but `prepare_pictures` runs in the step thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout_common.wire import WeightsId
from rollout_worker.engine import EngineRequest
from rollout_worker.engines.picture_model import (
    PictureInputs,
    PictureModel,
    PlacedPicture,
    place_pictures,
)
from rollout_worker.engines.picture_positions import grid_positions
from rollout_worker.engines.recent_values import RecentValues

from .weights.buffers import tensor_nbytes

KEPT_BYTES = 256 * 2**20
"""Of inputs, and of features: each some tens of pictures of a million pixels."""


@dataclass(frozen=True, slots=True)
class PromptPictures:
    """The pictures of one prompt.

    `positions`: [3, P] of the prompt's tokens for mRoPE, None for models that count tokens; `shift`: what is added
    to the positions of later tokens.
    """

    placed: tuple[PlacedPicture, ...]
    positions: Tensor | None
    shift: int


@dataclass(frozen=True, slots=True)
class PicturePart:
    """What pictures change in tokens of a row: `positions` [3, n] if they differ, and features [k, hidden] from an index on."""

    positions: Tensor | None
    features: list[tuple[int, Tensor]]


class PictureEncoder(PictureInputs):
    """The vision part of one model.

    Args:
        model: The model, whose weights are those that a pass uses.
        pictures: How it takes pictures.
    """

    def __init__(self, model: Any, pictures: PictureModel) -> None:
        super().__init__(pictures, KEPT_BYTES)
        self._model = model
        self._features = RecentValues[tuple[str, WeightsId], Tensor](KEPT_BYTES, tensor_nbytes)

    def place_prompt(self, request: EngineRequest) -> PromptPictures | None:
        """Return where a request's pictures are; None if it has none."""
        placed = place_pictures(request, self._pictures)
        if not placed:
            return None
        if not self._pictures.apart:
            return PromptPictures(placed, None, 0)
        grids = [self.inputs_of(each.picture)["image_grid_thw"][0].tolist() for each in placed]
        merge = self._pictures.processor.merge_size
        return PromptPictures(placed, *grid_positions(len(request.token_ids), placed, grids, merge))

    def part_between(
        self, prompt: PromptPictures | None, start: int, end: int, weights: WeightsId
    ) -> PicturePart | None:
        """Return what pictures change in tokens [start, end) of an output; None: nothing.

        `weights`: of this pass; features are computed with the model as it is now.
        """
        if prompt is None:
            return None
        features = []
        for each in prompt.placed:
            first = max(start, each.offset)
            last = min(end, each.offset + each.length)
            if first < last:
                whole = self._features_of(each, weights)
                features.append((first - start, whole[first - each.offset : last - each.offset]))
        positions = _positions_between(prompt, start, end)
        return PicturePart(positions, features) if features or positions is not None else None

    def _features_of(self, placed: PlacedPicture, weights: WeightsId) -> Tensor:
        def make_features() -> Tensor:
            inputs = {
                name: value.to(self._model.device)
                for name, value in self.inputs_of(placed.picture).items()
            }
            # LLaVA's tower does not convert pixels to its own dtype.
            inputs["pixel_values"] = inputs["pixel_values"].to(self._model.dtype)
            found = self._model.get_image_features(**inputs, return_dict=True).pooler_output
            whole = torch.cat(list(found)).to(self._model.dtype)
            if len(whole) != placed.length:
                raise RuntimeError(
                    f"a picture became {len(whole)} tokens, not the {placed.length} that were counted"
                )
            return whole

        return self._features.find_or_make((placed.picture.ref, weights), make_features)

    def forget_features(self, keeps: Iterable[WeightsId] = ()) -> None:
        """Drop the features that other weights than these have made."""
        kept = set(keeps)
        self._features.drop_values(lambda key: key[1] in kept)


def _positions_between(prompt: PromptPictures, start: int, end: int) -> Tensor | None:
    if prompt.positions is None:
        return None
    length = prompt.positions.shape[1]
    later = torch.arange(max(start, length), max(end, length)) + prompt.shift
    return torch.cat([prompt.positions[:, start:end], later.expand(3, -1)], dim=1)
