"""How a model takes pictures: its placeholders, how many of them a picture becomes, and what its processor makes of it.

All engines check requests by it before they see them: vLLM and SGLang use pictures wrongly, or hang, where the
placeholders of a prompt do not fit them.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_worker.engine import EngineError, EngineRequest, InvalidRequest
from rollout_worker.engines.recent_values import RecentValues
from rollout_worker.pictures.picture import Picture

logger = logging.getLogger(__name__)

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
GRID_FAMILIES = ("qwen2_vl", "qwen2_5_vl")
"""Models that keep the shape of a picture, and place its tokens in a grid (mRoPE)."""
PICTURE_FAMILIES = (*GRID_FAMILIES, "llava")
"""Values of `model_type` whose pictures are known here; any other model gets text only."""
CLASS_TOKEN_TOWERS = ("clip_vision_model",)
"""Vision models whose first token is of the whole picture; others have none."""
INPUTS_BYTES = 512 * 2**20
"""Of a model's inputs that are kept: some tens of pictures of a million pixels."""


@dataclass(frozen=True, slots=True)
class PictureModel:
    """What requests with pictures are checked by.

    `pad_id`: the placeholder. `never_sampled`: placeholders of all kinds; sampled ones would be taken for pictures in
    a later turn. `count_tokens`: placeholders of a picture of this height and width; raises ValueError if there can't be any.
    `apart`: there must be another token between two pictures, else their positions would be those of one.
    `processor`: transformers' image processor of the model.
    """

    pad_id: int
    never_sampled: frozenset[int]
    count_tokens: Callable[[int, int], int]
    apart: bool
    processor: Any

    def process_picture(self, picture: Picture) -> dict[str, Any]:
        """Return the model's inputs for one picture as torch tensors; blocks.

        Raises:
            InvalidRequest: its shape can't be used.
        """
        try:
            made = self.processor(images=[picture.to_image()], return_tensors="pt")
        except ValueError as error:
            raise _refuse_shape(picture, error) from None
        return dict(made)


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """A picture, and its placeholders: `[offset, offset + length)` of the prompt."""

    picture: Picture
    offset: int
    length: int


class PictureInputs:
    """A model's inputs of pictures (torch tensors by name), kept by their content up to `most` bytes; for any thread."""

    def __init__(self, model: PictureModel, most: int = INPUTS_BYTES) -> None:
        self._pictures = model
        self._inputs = RecentValues[str, dict[str, Any]](
            most, lambda made: sum(each.numel() * each.element_size() for each in made.values())
        )

    def prepare_pictures(self, pictures: Iterable[Picture]) -> None:
        """Compute the inputs of these pictures.

        Raises:
            InvalidRequest: one of them can't be used.
        """
        for each in pictures:
            self.inputs_of(each)

    def inputs_of(self, picture: Picture) -> dict[str, Any]:
        """Return the inputs of a picture, computed if they are not kept."""
        return self._inputs.find_or_make(
            picture.ref, lambda: self._pictures.process_picture(picture)
        )


def load_picture_model(folder: Path, config: Any) -> PictureModel | None:
    """Return how the model in a folder takes pictures, None if it takes none, or not here; blocks.

    Args:
        folder: Of the model.
        config: Its configuration, as transformers reads it.

    Raises:
        EngineError: the configuration of its processor can't be read.
    """
    if config.model_type not in PICTURE_FAMILIES:
        return None
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        logger.info("%s holds no configuration of a processor: no pictures", folder)
        return None
    if getattr(getattr(config, "vision_config", None), "model_type", "") == "pixtral":
        logger.warning(
            "pictures of this model keep their sizes, which is not supported: no pictures"
        )
        return None
    if importlib.util.find_spec("PIL") is None:
        logger.warning("Pillow is not installed: no pictures; pip install pillow")
        return None
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(str(folder), local_files_only=True)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise EngineError(
            f"the image processor of {str(folder)!r} cannot be loaded: {error}; repair its "
            "files, or remove them to serve text only"
        ) from error
    pad = int(config.image_token_id)
    grid = config.model_type in GRID_FAMILIES
    kinds = (getattr(config, name, None) for name in ("image_token_id", "video_token_id"))
    return PictureModel(
        pad_id=pad,
        never_sampled=frozenset(each for each in kinds if each is not None),
        count_tokens=_grid_counter(processor) if grid else _fixed_counter(processor, config),
        apart=grid,
        processor=processor,
    )


def read_picture_model(folder: Path, kind: object) -> PictureModel | None:
    """Return the same, given only `model_type` of the folder's config.json; transformers is not asked for other kinds.

    Raises:
        EngineError: a configuration can't be read.
    """
    if kind not in PICTURE_FAMILIES:
        return None
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise EngineError(f"transformers does not know this model: {error}") from error
    return load_picture_model(folder, config)


def _grid_counter(processor: Any) -> Callable[[int, int], int]:
    """Return the count for models that resize a picture to whole patches, and merge squares of these."""
    merged: int = processor.merge_size**2

    def count_tokens(height: int, width: int) -> int:
        patches: int = processor.get_number_of_image_patches(height, width, {})
        return patches // merged

    return count_tokens


def _fixed_counter(processor: Any, config: Any) -> Callable[[int, int], int]:
    """Return the count for models that make all pictures one size."""
    from PIL import Image

    pixels = processor(images=[Image.new("RGB", (64, 64))], return_tensors="pt")["pixel_values"]
    tower = config.vision_config
    count = (pixels.shape[-2] // tower.patch_size) * (pixels.shape[-1] // tower.patch_size)
    count += tower.model_type in CLASS_TOKEN_TOWERS
    count -= config.vision_feature_select_strategy == "default"
    return lambda height, width: count


def place_pictures(request: EngineRequest, model: PictureModel) -> tuple[PlacedPicture, ...]:
    """Return where the pictures of a prompt are.

    Raises:
        InvalidRequest: its placeholders are not those of its pictures.
    """
    ids = request.token_ids
    odd = next((each for each in model.never_sampled if each != model.pad_id and each in ids), None)
    if odd is not None:
        raise InvalidRequest(
            "token_ids", f"has placeholders of videos (id {odd}), which are not taken: remove them"
        )
    at = [index for index, token in enumerate(ids) if token == model.pad_id]
    if at and not request.pictures:
        raise InvalidRequest(
            "token_ids",
            f"has {len(at)} placeholders (id {model.pad_id}) and no picture: add them as multimodal.images",
        )
    needed = [_count_placeholders(each, model) for each in request.pictures]
    if sum(needed) != len(at):
        parts = " + ".join(map(str, needed))
        raise InvalidRequest(
            "multimodal.images",
            f"the pictures become {parts} = {sum(needed)} tokens, token_ids has {len(at)} "
            f"placeholders (id {model.pad_id}): use the ids that the model's processor returns",
        )
    return _fill_runs(request.pictures, needed, at, model)


def _fill_runs(
    pictures: Sequence[Picture], needed: Sequence[int], at: Sequence[int], model: PictureModel
) -> tuple[PlacedPicture, ...]:
    found: list[PlacedPicture] = []
    first = 0
    for index, (picture, count) in enumerate(zip(pictures, needed, strict=True)):
        run = 1
        while first + run < len(at) and at[first + run] == at[first] + run:
            run += 1
        if run < count or (model.apart and run > count):
            raise InvalidRequest(
                f"multimodal.images.{index}",
                f"a picture of {picture.width} x {picture.height} becomes {count} tokens, and "
                f"token_ids has {run} placeholders in a row for it: use the ids that the model's processor returns",
            )
        found.append(PlacedPicture(picture, at[first], count))
        first += count
    return tuple(found)


def _count_placeholders(picture: Picture, model: PictureModel) -> int:
    try:
        return model.count_tokens(picture.height, picture.width)
    except ValueError as error:
        raise _refuse_shape(picture, error) from None


def _refuse_shape(picture: Picture, error: ValueError) -> InvalidRequest:
    size = f"{picture.width} x {picture.height}"
    return InvalidRequest(
        "multimodal.images",
        f"the model takes no picture of {size} ({error}): crop or scale it",
    )


def check_pictures(request: EngineRequest, model: PictureModel | None) -> None:
    """Raise `InvalidRequest` for placeholders that do not fit, and if nothing else is allowed; None: there are none."""
    if model is None:
        return
    place_pictures(request, model)
    allowed = request.sampling.allowed_token_ids
    if allowed is not None and model.never_sampled.issuperset(allowed):
        raise InvalidRequest(
            "sampling.allowed_token_ids",
            "allows only placeholders of pictures, which are never sampled: allow another id",
        )


def banned_tokens(model: PictureModel | None) -> frozenset[int]:
    """Return the ids that no request samples."""
    return frozenset() if model is None else model.never_sampled
