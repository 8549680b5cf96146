"""Three-axis rope positions (mRoPE) of the tokens a turn adds, for Qwen-VL processors.

Text advances all three axes (time, height, width) together; a vision block spans its grid, and the
next token's position is one above the block's largest, as in vLLM, SGLang and verl.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .buffers import INT32
from .streams import Rope

Block = tuple[int, int, int, float]
"""A vision block: time, height and width in merged patches, and the step of the time axis."""


@dataclass(frozen=True, slots=True)
class RopeLayout:
    """How a processor lays out vision blocks.

    Attributes:
        seconds_step: Positions per second of video (2 for Qwen2.5-VL); 0: one per time patch.
        by_frame: Each video frame is a block of its own, between timestamps (Qwen3-VL).
    """

    image_id: int
    video_id: int
    merge: int
    seconds_step: float = 0
    by_frame: bool = False

    @classmethod
    def of(cls, processor: Any) -> RopeLayout | None:
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

    def positions(self, ids: Sequence[int], inputs: Mapping[str, Any]) -> Rope:
        """Return three rows of positions for these tokens, counted from 0.

        Raises:
            ValueError: Placeholders and grids do not match.
        """
        blocks = {
            self.image_id: self._blocks(inputs, "image_grid_thw", video=False),
            self.video_id: self._blocks(inputs, "video_grid_thw", video=True),
        }
        axes = array(INT32), array(INT32), array(INT32)
        at, position = 0, 0
        while at < len(ids):
            grid = next(blocks[ids[at]], None) if ids[at] in blocks else None
            if grid is None:
                if ids[at] in blocks:
                    raise ValueError(f"vision placeholder at token {at} of the turn has no grid")
                end = _next(ids, at, blocks)
                for axis in axes:
                    axis.extend(range(position, position + end - at))
                at, position = end, position + end - at
                continue
            count, position = _lay(axes, grid, position)
            if any(token != ids[at] for token in ids[at : at + count]) or at + count > len(ids):
                raise ValueError(
                    f"vision block at token {at} of the turn: its grid needs {count} placeholders"
                )
            at += count
        if any(next(rest, None) for rest in blocks.values()):
            raise ValueError("more vision grids than placeholders in the turn")
        return axes

    def _blocks(self, inputs: Mapping[str, Any], key: str, video: bool) -> Iterator[Block]:
        grids = inputs.get(key)
        seconds = inputs.get("second_per_grid_ts")
        for index, grid in enumerate([] if grids is None else grids):
            time, height, width = (int(size) for size in grid)
            step = 1.0
            if video and self.seconds_step:
                step = self.seconds_step * (1.0 if seconds is None else float(seconds[index]))
            block = height // self.merge, width // self.merge
            if video and self.by_frame:
                yield from ((1, *block, 1.0) for _ in range(time))
            else:
                yield time, *block, step


def _next(ids: Sequence[int], start: int, stops: Mapping[int, Any]) -> int:
    """Return where the next vision block begins, or the end."""
    found = len(ids)
    for stop in stops:
        try:
            found = ids.index(stop, start, found)
        except ValueError:
            continue
    return found


def _lay(axes: Rope, block: Block, start: int) -> tuple[int, int]:
    """Append a block's positions; return its token count and the position after it."""
    times, height, width, step = block
    for t in range(times):
        time = start + int(t * step)
        for h in range(height):
            axes[0].extend([time] * width)
            axes[1].extend([start + h] * width)
            axes[2].extend(range(start, start + width))
    largest = max(int((times - 1) * step), height - 1, width - 1)
    return times * height * width, start + largest + 1
