"""One pass of the model over some rows of the KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention import AttentionBlock, ForwardPass, current_pass
from .expert_routes import find_routers
from .kv import KvRows
from .lora_layers import HfAdapter, LoraLayers, find_segments
from .picture_features import PicturePart


@dataclass(frozen=True, slots=True)
class RowFeed:
    """Tokens to feed to a row that already holds `start` tokens.

    `wanted`: those whose logits are, by index. `pictures`: what pictures change in them. `adapter`: of their request.
    """

    row: int
    start: int
    tokens: Sequence[int]
    wanted: Sequence[int] = ()
    pictures: PicturePart | None = None
    adapter: HfAdapter | None = None

    @property
    def end(self) -> int:
        """How many tokens the row holds after the pass."""
        return self.start + len(self.tokens)


class ForwardRunner:
    """Runs a model on any mixture of rows and lengths; a row's logits are as if it were alone."""

    def __init__(self, model: Any, kv: KvRows) -> None:
        self._model = model
        self._kv = kv
        self.routers = find_routers(model)
        self.lora = LoraLayers(model)
        self._device = model.device
        text = model.config.get_text_config()
        self.vocab_size: int = text.vocab_size
        kinds = getattr(text, "layer_types", None)
        self._window: int | None = getattr(text, "sliding_window", None)
        self._slides = [kind == "sliding_attention" for kind in kinds] if kinds else None
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run_pass(
        self, singles: Sequence[RowFeed], pieces: Sequence[RowFeed], *, routed: bool = False
    ) -> tuple[Tensor, bytes]:
        """Feed one token to each row of `singles`, and several to each of `pieces`.

        Returns the logits [K, V] after the singles, and after the wanted tokens of each piece; if `routed`, also the
        experts of all tokens that were fed, [N, layers, top_k] as of `RouterRecorder`.
        """
        feeds = (*singles, *pieces)
        ids = torch.tensor([[token for feed in feeds for token in feed.tokens]])
        places = torch.tensor(
            [
                [feed.row for feed in feeds for _ in feed.tokens],
                [column for feed in feeds for column in range(feed.start, feed.end)],
            ],
            device=self._device,
        )
        last = list(range(len(singles)))
        end = len(singles)
        for feed in pieces:
            last += [end + index for index in feed.wanted]
            end += len(feed.tokens)
        self._kv.places = (places[0], places[1])
        self.lora.segments = find_segments([(len(feed.tokens), feed.adapter) for feed in feeds])
        current_pass.now = ForwardPass(
            self._make_blocks(singles, pieces, places[1]), bool(singles), self._has_window
        )
        try:
            inputs = self._model_inputs(ids, places[1:], feeds)
            if not routed or self.routers is None:
                return self._call_model(inputs, last), b""
            with self.routers.record_pass() as chosen:
                logits = self._call_model(inputs, last)
            return logits, self.routers.collect_routes(chosen)
        finally:
            current_pass.now = self._kv.places = None
            self.lora.segments = ()

    def _model_inputs(
        self, ids: Tensor, columns: Tensor, feeds: Sequence[RowFeed]
    ) -> dict[str, Tensor]:
        """Return the arguments for tokens [1, N] at columns [1, N]; with pictures, their embeddings instead of ids."""
        ids = ids.to(self._device)
        if not any(feed.pictures for feed in feeds):
            return {"input_ids": ids, "position_ids": columns}
        embeds = self._model.get_input_embeddings()(ids)
        places = columns
        if any(feed.pictures.positions is not None for feed in feeds if feed.pictures):
            places = columns.expand(3, 1, -1).clone()
        at = 0
        for feed in feeds:
            if feed.pictures is not None:
                for index, features in feed.pictures.features:
                    embeds[0, at + index : at + index + len(features)] = features
                if feed.pictures.positions is not None:
                    places[:, 0, at : at + len(feed.tokens)] = feed.pictures.positions
            at += len(feed.tokens)
        return {"inputs_embeds": embeds, "position_ids": places}

    def _call_model(self, inputs: dict[str, Tensor], last: list[int]) -> Tensor:
        every = len(last) == inputs["position_ids"].shape[-1]
        picked = None if every else torch.tensor(last, dtype=torch.long, device=self._device)
        extra = {"logits_to_keep": picked} if self._keeps and not every else {}
        logits: Tensor = self._model(
            **inputs,
            past_key_values=self._kv,
            use_cache=True,
            **extra,
        ).logits[0]
        return logits if every or self._keeps else logits[picked]

    def _has_window(self, layer: int) -> bool:
        if self._window is None:
            return False
        return True if self._slides is None else self._slides[layer]

    def _make_blocks(
        self, singles: Sequence[RowFeed], pieces: Sequence[RowFeed], columns: Tensor
    ) -> tuple[AttentionBlock, ...]:
        found = []
        at = len(singles)
        if singles:
            rows = [feed.row for feed in singles]
            run = range(rows[0], rows[0] + len(rows))
            contiguous = rows == list(run)
            where = (
                slice(run.start, run.stop)
                if contiguous
                else torch.tensor(rows, device=self._device)
            )
            found.append(self._make_block(0, at, where, singles, columns[:at].view(-1, 1)))
        for feed in pieces:
            end = at + len(feed.tokens)
            where = slice(feed.row, feed.row + 1)
            found.append(self._make_block(at, end, where, [feed], columns[at:end].view(1, -1)))
            at = end
        return tuple(found)

    def _make_block(
        self,
        begin: int,
        end: int,
        rows: slice | Tensor,
        feeds: Sequence[RowFeed],
        positions: Tensor,
    ) -> AttentionBlock:
        """Return the block of tokens at `positions` [B, C]."""
        width = max(feed.end for feed in feeds)
        behind = positions[:, None, :, None] - torch.arange(width, device=self._device)
        # One token of each row, all rows equally long: there is nothing to mask.
        whole = positions.shape[1] == 1 and all(feed.end == width for feed in feeds)
        far = None if whole else self._additive_mask(behind < 0)
        near = far
        if self._window is not None and width > self._window:
            near = self._additive_mask((behind < 0) | (behind >= self._window))
        return AttentionBlock(begin, end, rows, width, far, near)

    def _additive_mask(self, mask: Tensor) -> Tensor:
        """Return what to add to the scores where `mask` hides a token."""
        least = torch.finfo(self._model.dtype).min
        return torch.zeros(mask.shape, dtype=self._model.dtype, device=self._device).masked_fill_(
            mask, least
        )
