"""Keys and values of the running outputs: one row each, written in place.

Per layer there is one tensor [rows, heads, capacity, head_dim] for keys and one for values. Row i
holds the tokens of running output i from column 0 on. So rows of different lengths have no
padding between prompt and output, a row joins or leaves without moving the others,
and a step writes one column of each row instead of copying the cache. No token attends to columns beyond a
row's length (`attention.py`), but their values must be finite: a row is zeroed when an output takes it.
`KvRows` replaces transformers' own cache: the model's layers call `update`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

ROW_STEP, COLUMN_STEP = 8, 128
"""The cache grows by whole steps, so that it grows rarely."""


class KvRows(Cache):  # type: ignore[misc]  # transformers is untyped
    """The rows; grow with the running outputs, never beyond `max_tokens` (rows x capacity)."""

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._rows = 0
        self._capacity = 0
        self.places: tuple[Tensor, Tensor] | None = None
        """Rows and columns, [N] each, of the N tokens of the pass under way."""

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        layers = [*self._keys.values(), *self._values.values()]
        return sum(layer.numel() * layer.element_size() for layer in layers)

    def reserve_rows(self, rows: int, columns: int, longest: int) -> None:
        """Make room for `rows` rows of `columns` columns, which never get longer than `longest`."""
        if rows <= self._rows and columns <= self._capacity:
            return
        grown = max(columns, columns * 3 // 2) if self._capacity else columns
        capacity = min(-(-grown // COLUMN_STEP) * COLUMN_STEP, max(longest, columns))
        fit = max(rows, self._max_tokens // capacity)
        self._rows = min(-(-rows // ROW_STEP) * ROW_STEP, self._max_rows, fit)
        self._capacity = capacity
        for layers in (self._keys, self._values):
            for index, old in layers.items():
                layers[index] = self._grow_layer(old)

    def _grow_layer(self, old: Tensor) -> Tensor:
        heads, width = old.shape[1], old.shape[3]
        new = old.new_zeros(self._rows, heads, self._capacity, width)
        rows, columns = min(self._rows, old.shape[0]), min(self._capacity, old.shape[2])
        new[:rows, :, :columns] = old[:rows, :, :columns]
        return new

    def clear(self, row: int) -> None:
        """Zero a row, so that nothing of its former output is left, least of all a NaN."""
        for layer in (*self._keys.values(), *self._values.values()):
            if row < layer.shape[0]:
                layer[row].zero_()

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of a row over another row, and zero the rest of it."""
        for layer in (*self._keys.values(), *self._values.values()):
            row = layer[target]
            row[:, :length] = layer[source, :, :length]
            row[:, length:].zero_()

    def drop_rows(self) -> None:
        """Give all memory back; every row is lost."""
        self._keys.clear()
        self._values.clear()
        self._rows = self._capacity = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [1, H, N, D] to `places`; return whole layers."""
        return (
            self._write_states(self._keys, layer_idx, key_states),
            self._write_states(self._values, layer_idx, value_states),
        )

    def _write_states(self, layers: dict[int, Tensor], index: int, states: Tensor) -> Tensor:
        if self.places is None:
            raise RuntimeError("the KV rows were used outside a forward pass")
        if index not in layers:
            heads, width = states.shape[1], states.shape[3]
            layers[index] = states.new_zeros(self._rows, heads, self._capacity, width)
        layer = layers[index]
        rows, columns = self.places
        layer[rows, :, columns] = states[0].transpose(0, 1)
        return layer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: every pass is given its positions and masks, so no common length is needed."""
        return 0
