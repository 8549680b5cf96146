"""One interface to tokenizers and multimodal processors: render, encode, decode, lay out positions.

Anything with the methods of a `transformers` tokenizer or processor works; this module imports
neither transformers nor torch. With Qwen-VL processors positions have three axes (mRoPE): text
advances time, height and width together, a vision block spans its grid, and the next token's
position is one above the block's largest, as in vLLM, SGLang and verl.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from .boundaries import common_length
from .columns import INT32, RopePositions
from .template_messages import STAND_IN, MediaLists, Message

VisionBlock = tuple[int, int, int, float]
"""A vision block: time, height and width in merged patches, and the step of the time axis."""


@dataclass(frozen=True, slots=True)
class RopeLayout:
    """How a processor lays out vision blocks."""

    image_id: int
    video_id: int
    merge: int
    seconds_step: float = 0
    """Positions per second of video (2 for Qwen2.5-VL); 0: one per time patch."""
    by_frame: bool = False
    """Each video frame is a block of its own, between timestamps (Qwen3-VL)."""

    @classmethod
    def from_processor(cls, processor: Any) -> RopeLayout | None:
        """Return the layout of a Qwen-VL processor; None: positions just count up."""
        vision = getattr(processor, "image_processor", None)
        if "Qwen2VLImageProcessor" not in type(vision).__name__:
            return None
        convert = processor.tokenizer.convert_tokens_to_ids
        name = type(processor).__name__
        return cls(
            image_id=convert("<|image_pad|>"),
            video_id=convert("<|video_pad|>"),
            merge=int(getattr(vision, "merge_size", 2)),
            seconds_step=2.0 if "Qwen2_5" in name else 0.0,
            by_frame="Qwen3" in name,
        )

    def rope_positions(self, ids: Sequence[int], inputs: Mapping[str, Any]) -> RopePositions:
        """Return three rows of positions for these tokens, counted from 0."""
        blocks = {
            self.image_id: self._vision_blocks(inputs, "image_grid_thw", video=False),
            self.video_id: self._vision_blocks(inputs, "video_grid_thw", video=True),
        }
        axes = array(INT32), array(INT32), array(INT32)
        at = position = 0
        while at < len(ids):
            if ids[at] not in blocks:
                for axis in axes:
                    axis.append(position)
                at, position = at + 1, position + 1
                continue
            if (block := next(blocks[ids[at]], None)) is None:
                raise ValueError(f"vision placeholder at token {at} of the turn has no grid")
            before, position = len(axes[0]), _append_block(axes, block, position)
            count = len(axes[0]) - before
            if list(ids[at : at + count]) != [ids[at]] * count:
                raise ValueError(
                    f"vision block at token {at} of the turn: its grid needs {count} placeholders"
                )
            at += count
        if any(next(rest, None) for rest in blocks.values()):
            raise ValueError("more vision grids than placeholders in the turn")
        return axes

    def _vision_blocks(
        self, inputs: Mapping[str, Any], key: str, video: bool
    ) -> Iterator[VisionBlock]:
        grids, seconds = inputs.get(key), inputs.get("second_per_grid_ts")
        for index, grid in enumerate([] if grids is None else grids):
            time, height, width = (int(size) for size in grid)
            block = height // self.merge, width // self.merge
            step = 1.0
            if video and self.seconds_step:
                step = self.seconds_step * (1.0 if seconds is None else float(seconds[index]))
            if video and self.by_frame:
                yield from [(1, *block, 1.0)] * time
            else:
                yield time, *block, step


def _append_block(axes: RopePositions, block: VisionBlock, start: int) -> int:
    """Append a block's positions; return the position after it."""
    times, height, width, step = block
    for t, h in product(range(times), range(height)):
        axes[0].extend([start + int(t * step)] * width)
        axes[1].extend([start + h] * width)
        axes[2].extend(range(start, start + width))
    return start + max(int((times - 1) * step), height - 1, width - 1) + 1


_TEXT_KEYS = frozenset((
    "input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "position_ids",
    "special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "length",
))  # fmt: skip
CONTEXT_CHARACTERS = 64
"""Characters before a boundary that can change how a tokenizer splits what follows."""

_PROCESSOR_PARTS = ("image_processor", "video_processor", "feature_extractor", "audio_processor")


class TemplateError(ValueError):
    """A chat template rejected messages or can't be continued; the text says which and why."""


class Codec:
    """A tokenizer, or a processor with its tokenizer."""

    def __init__(self, processing_class: Any) -> None:
        self.source = processing_class
        parts = (getattr(processing_class, name, None) for name in _PROCESSOR_PARTS)
        self.parts = [part for part in parts if part]
        self.tokenizer = processing_class.tokenizer if self.parts else processing_class

    @cached_property
    def rope_layout(self) -> RopeLayout | None:
        """How positions are laid out; None: they just count up."""
        return RopeLayout.from_processor(self.source)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Added tokens, which never merge with ordinary text, and their ids."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        found = {str(token): int(index) for index, token in added.items()}
        texts = getattr(self.tokenizer, "all_special_tokens", ())
        return found | {text: self.tokenizer.convert_tokens_to_ids(text) for text in texts}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of `special_tokens`."""
        return frozenset(self.special_tokens.values())

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a turn, according to the tokenizer."""
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return frozenset(() if eos is None else eos if isinstance(eos, list) else (eos,))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        options: Mapping[str, Any],
        *,
        generation_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation; raise TemplateError if the template rejects it."""
        try:
            text = self.source.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **options,
            )
        except Exception as error:  # a template may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages[-6:])
            raise TemplateError(
                f"the chat template rejected messages (… {roles}): {error}"
            ) from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; adds no BOS, as templates print their own."""
        return self._encode_ids(_check_real(text))

    def _encode_ids(self, text: str) -> list[int]:
        if not text:
            return []
        # The Rust backend costs half as much for a short text.
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        if fast is not None and fast.truncation is None and fast.padding is None:
            ids: list[int] = fast.encode(text, add_special_tokens=False).ids
        else:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_after(self, before: str, text: str) -> tuple[list[int], bool]:
        """Return the ids of a text that follows another, and whether the boundary is clean.

        It is not clean if the tokenizer merges across it: no ids after those before would equal
        those of the whole. Then the ids of the text alone are returned.
        """
        context = self.last_special(before) or before[-CONTEXT_CHARACTERS:]
        ids = self._encode_ids(context)
        whole = self._encode_ids(context + _check_real(text))
        if whole[: len(ids)] == ids:
            return whole[len(ids) :], True
        return self.encode(text), False

    def encode_media(
        self, text: str, media: MediaLists, options: Mapping[str, Any]
    ) -> tuple[list[int], dict[str, Any]]:
        """Return the ids of a text with its media inserted, and the tensors of the media alone."""
        given = {key: items for key, items in media.items() if items}
        if not given:
            return self.encode(text), {}
        if not self.parts:
            counts = ", ".join(f"{len(items)} {key}" for key, items in given.items())
            raise ValueError(f"got {counts} with a bare tokenizer: pass the model's processor")
        names = {"image": "images", "video": "videos", "audio": "audio"}
        arguments = {names[key]: items for key, items in given.items()}
        found = self.source(
            text=[_check_real(text)], return_tensors="pt", add_special_tokens=False,
            **arguments, **options,
        )  # fmt: skip
        ids = [int(token) for token in found["input_ids"][0]]
        return ids, {key: value for key, value in found.items() if self._is_media(key, value, ids)}

    def _is_media(self, key: str, value: Any, ids: Sequence[int]) -> bool:
        if any(key in getattr(part, "model_input_names", ()) for part in self.parts):
            return True
        of_text = key in _TEXT_KEYS or key in getattr(self.tokenizer, "model_input_names", ())
        return not of_text and tuple(getattr(value, "shape", ())) != (1, len(ids))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    # Special tokens within texts.

    def last_special(self, text: str) -> str:
        """Return the end of a text from its last special token on; empty: the end has none."""
        tail = text[-CONTEXT_CHARACTERS:]
        found = [match.start() for match in self._special_pattern.finditer(tail)]
        return tail[found[-1] :] if found else ""

    def shared_end(self, own: str, text: str) -> str:
        """Return how much of `own`, whole or from a special token on, a text ends with."""
        starts = [0, *(match.start() for match in self._special_pattern.finditer(own))]
        return next((own[start:] for start in starts if text.endswith(own[start:])), "")

    def first_special(self, text: str) -> str:
        """Return the special token that a text begins with; empty: with none."""
        found = self._special_pattern.match(text)
        return found[0] if found else ""

    def without_specials(self, text: str) -> str:
        """Return a text without its special tokens."""
        return self._special_pattern.sub("", text)

    def shared_beginning(self, a: str, b: str) -> str:
        """Return the common beginning of two texts, up to a special token that only one has."""
        length = common_length(a, b)
        near = max(0, length - CONTEXT_CHARACTERS)
        for text in (a, b):
            for match in self._special_pattern.finditer(text, near, length + CONTEXT_CHARACTERS):
                if match.start() < length < match.end():
                    length = match.start()
        return a[:length]

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        texts = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) if texts else "(?!)")


def _check_real(text: str) -> str:
    """Refuse a text with the words of stand-ins: the last check before a text becomes ids."""
    if found := STAND_IN.search(text):
        raise TemplateError(
            f"the chat template prints {found[0]!r} in place of a content: it moves earlier "
            "messages into later turns; use another template"
        )
    return text
