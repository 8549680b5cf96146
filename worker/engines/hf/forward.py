"""One pass of the model over some rows of the KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .kv import KvRows, Window


class Forward:
    """Runs a model on [B, C] tokens of B rows, each row at its own position.

    Shorter rows are padded on the right: a padding token sees its row's tokens, nobody sees it,
    and it is not written to the cache. The answer for a row is hence that of the row alone.
    """

    def __init__(self, model: Any, kv: KvRows) -> None:
        self._model = model
        self._kv = kv
        self._device = model.device
        text = model.config.get_text_config()
        self._window = getattr(text, "sliding_window", None)
        self._kinds = set(getattr(text, "layer_types", None) or ())
        self._slides = not self._kinds and bool(self._window)
        self._additive = model.config._attn_implementation == "eager"
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(
        self, rows: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> Tensor:
        """Feed `tokens[i]` to `rows[i]`, which holds `starts[i]` tokens; rows may feed nothing.

        Returns the logits after each row's last token, [B, V]; meaningless for one fed nothing.
        """
        counts = torch.tensor([len(part) for part in tokens])
        columns = max(1, int(counts.max()))
        padded = torch.tensor([[*part, *[0] * (columns - len(part))] for part in tokens])
        first = torch.tensor(starts)
        steps = torch.arange(columns)
        # Padding repeats the last position, so that it never exceeds what the model knows.
        positions = first[:, None] + torch.minimum(steps, (counts - 1).clamp(min=0)[:, None])
        width = int((first + counts.clamp(min=1)).max())
        self._kv.window = self._make_window(rows, counts, first, steps, width)
        try:
            return self._call(padded, positions, width, (counts - 1).clamp(min=0))
        finally:
            self._kv.window = None

    def _make_window(
        self, rows: Sequence[int], counts: Tensor, first: Tensor, steps: Tensor, width: int
    ) -> Window:
        real = steps < counts[:, None]
        index = torch.tensor(rows)
        contiguous = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        whole = bool(real.all())
        return Window(
            rows=slice(rows[0], rows[0] + len(rows)) if contiguous else index.to(self._device),
            width=width,
            rows_at=index.repeat_interleave(counts).to(self._device),
            columns_at=(first[:, None] + steps)[real].to(self._device),
            real=None if whole else real.to(self._device),
        )

    def _call(self, padded: Tensor, positions: Tensor, width: int, last: Tensor) -> Tensor:
        device = self._device
        kept, at = torch.unique(last, return_inverse=True)
        extra = {"logits_to_keep": kept.to(device)} if self._keeps else {}
        logits: Tensor = self._model(
            input_ids=padded.to(device),
            position_ids=positions.to(device),
            attention_mask=self._masks(positions.to(device), width),
            past_key_values=self._kv,
            use_cache=True,
            **extra,
        ).logits
        picked = at if self._keeps else last
        return logits[torch.arange(len(last), device=device), picked.to(device)]

    def _masks(self, positions: Tensor, width: int) -> Tensor | dict[str, Tensor]:
        columns = torch.arange(width, device=positions.device)
        behind = positions[:, None, :, None] - columns
        causal = behind >= 0
        if not self._window:
            return self._finished(causal)
        near = self._finished(causal & (behind < self._window))
        if len(self._kinds) > 1:
            return {"full_attention": self._finished(causal), "sliding_attention": near}
        slides = self._slides or "sliding_attention" in self._kinds
        return near if slides else self._finished(causal)

    def _finished(self, allowed: Tensor) -> Tensor:
        """Return the mask as the attention wants it: booleans, or what to add to the scores."""
        if not self._additive:
            return allowed
        dtype = self._model.dtype
        zero = torch.zeros((), dtype=dtype, device=allowed.device)
        return torch.where(allowed, zero, torch.finfo(dtype).min)
