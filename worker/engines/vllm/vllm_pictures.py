"""Pictures for vLLM: its multimodal input, made here of a prompt whose placeholders are expanded already.

vLLM's own way from a picture to its input would expand them a second time, without an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout_worker.engine import EngineRequest
from rollout_worker.engines.picture_model import PictureInputs, PlacedPicture, place_pictures


class VllmPictures(PictureInputs):
    """What the model's processor makes of pictures."""

    def make_input(self, request: EngineRequest, salt: str) -> Any:
        """Return vLLM's input for a request with pictures; blocks. `salt`: of the prefixes that it may share."""
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import PlaceholderRange

        placed = place_pictures(request, self._pictures)
        return mm_input(
            list(request.token_ids),
            self._make_items(placed),
            # vLLM keeps features by this name, and trusts it: it is of the content, and of the weights in the salt.
            {"image": [f"{each.picture.ref} {salt}" for each in placed]},
            {
                "image": [
                    PlaceholderRange(offset=each.offset, length=each.length) for each in placed
                ]
            },
            cache_salt=salt,
        )

    def _make_items(self, placed: Iterable[PlacedPicture]) -> Any:
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

        items = []
        for each in placed:
            made = self.inputs_of(each.picture)
            fields: dict[str, Any] = {}
            if "image_grid_thw" in made:
                sizes = made["image_grid_thw"].prod(-1)
                fields["pixel_values"] = MultiModalFieldConfig.flat_from_sizes("image", sizes)
                fields["image_grid_thw"] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
            else:
                fields["pixel_values"] = MultiModalFieldConfig.batched("image")
            items += MultiModalKwargsItems.from_hf_inputs(made, fields)["image"]
        return MultiModalKwargsItems({"image": items})
