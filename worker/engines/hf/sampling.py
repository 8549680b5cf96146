"""Drawing one token for each row of a batch, and the log-probabilities of what was drawn.

Order of application: allowed ids and logit bias, penalties, `min_tokens`, temperature, `min_p`,
`top_k`, `top_p` (`processing.py`). Randomness is counter-based: the uniform number of a token
depends on the request's seed and the token's position in the output, so a seed gives the same
output whatever else is in the batch, and also after a prefix was computed again. A token is found
by inverting the cumulative distribution, one number a token, the same on every device.

The vocabulary is gone through once for the maximum and once for the exponentials; their sums by
blocks of 64 give the total, hence the log-probability, and lead to the block that holds the token.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rollout_worker.engines.drawing import invert
from rollout_worker.schemas import LogprobsOf

from .processing import Processing, SamplerState

BLOCK = 64
LEAST_HEAT = 1e-30
"""Smaller temperatures leave the range of float32; these are greedy but for equal logits already."""
_STEP = np.uint64(0x9E3779B97F4A7C15)


class Row(Protocol):
    """What the sampler must know of an output."""

    sampler: SamplerState
    key: int
    """Of its random numbers, from `random_key`."""

    @property
    def produced(self) -> int:
        """Length of the output so far."""
        ...

    @property
    def logprobs_of(self) -> LogprobsOf | None:
        """Which log-probability to record."""
        ...


class Sampler:
    """Draws for a batch; what depends on the batch alone is kept until the batch changes."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._batch: _Batch | None = None
        self._work = torch.empty(0, 0)
        self._mass = torch.empty(0, 0)

    def draw(self, logits: Tensor, rows: Sequence[Row]) -> tuple[list[int], list[float]]:
        """Draw a token for each row from `logits` [B, V].

        Returns tokens [B] and natural log-probabilities [B]; one that is not finite says that the
        row's logits were not, and its token means nothing.
        """
        batch = self._batch
        if batch is None or list(rows) != self._rows:
            batch = self._batch = _Batch(rows, logits.device)
            self._rows = list(rows)
        self._make_room(logits)
        count, vocab = logits.shape
        work, mass = self._work[:count, :vocab], self._mass[:count]
        work.copy_(logits)
        batch.processing.before_heat(work, batch.positions)
        # Shifting by the maximum first keeps the quotient in range however small the temperature.
        work -= work.amax(dim=-1, keepdim=True)
        if batch.heat is not None:
            work /= batch.heat
        batch.processing.after_heat(work)
        torch.exp(work, out=mass[:, :vocab])
        blocks = mass.view(count, -1, BLOCK)
        cumulative = blocks.sum(dim=-1).double().cumsum(dim=-1)
        tokens = self._tokens(batch, work, blocks, cumulative)
        chosen = work.gather(1, tokens.unsqueeze(1)).squeeze(1) - cumulative[:, -1].log()
        if batch.raw is not None:
            own = logits[batch.raw].float()
            value = own.gather(1, tokens[batch.raw].unsqueeze(1)).squeeze(1) - own.logsumexp(-1)
            # What the processed logits say of finiteness stands.
            chosen[batch.raw] = torch.where(chosen[batch.raw].isfinite(), value.double(), torch.nan)
        batch.advance(tokens)
        return tokens.tolist(), chosen.tolist()

    @staticmethod
    def _tokens(batch: _Batch, work: Tensor, blocks: Tensor, cumulative: Tensor) -> Tensor:
        if batch.all_greedy:
            return work.argmax(dim=-1)
        tokens = invert(blocks, cumulative, batch.uniforms()).clamp_(max=work.shape[1] - 1)
        if batch.greedy is not None:
            tokens[batch.greedy] = work[batch.greedy].argmax(dim=-1)
        return tokens

    def _make_room(self, logits: Tensor) -> None:
        """Keep the two big buffers: taking them anew each step costs more than using them."""
        count, vocab = logits.shape
        width = -(-vocab // BLOCK) * BLOCK
        if len(self._work) < count or self._work.shape[1] != width:
            self._work = torch.empty(count, width, device=logits.device)
            self._mass = torch.zeros(count, width, device=logits.device)  # beyond V it stays 0


class _Batch:
    """The parameters of a batch as tensors."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self._device = device
        params = [row.sampler.sampling for row in rows]
        greedy = [i for i, p in enumerate(params) if p.temperature == 0]
        heat = [max(p.temperature, LEAST_HEAT) if p.temperature else 1.0 for p in params]
        self.all_greedy = len(greedy) == len(rows)
        self.greedy = torch.tensor(greedy, device=device) if greedy else None
        hot = any(value != 1 for value in heat)
        self.heat = torch.tensor(heat, device=device).unsqueeze(1) if hot else None
        self.processing = Processing([row.sampler for row in rows], device)
        # Where temperature and processing change nothing, raw is what was sampled from.
        raw = [
            i
            for i, row in enumerate(rows)
            if row.logprobs_of == "raw" and (heat[i] != 1 or row.sampler.changes)
        ]
        self.raw = torch.tensor(raw, device=device) if raw else None
        self._keys = np.array([row.key for row in rows], dtype=np.uint64)
        self.positions = np.array([row.produced for row in rows], dtype=np.int64)

    def uniforms(self) -> Tensor:
        """Return this step's numbers in [0, 1), [B] double."""
        return torch.from_numpy(uniforms(self._keys, self.positions)).to(self._device)

    def advance(self, tokens: Tensor) -> None:
        """Note that each row got a token."""
        self.positions += 1
        self.processing.count(tokens)


def random_key(seed: int) -> int:
    """Return 64 bits that look random, from a seed."""
    data = struct.pack("<Q", seed & (2**64 - 1))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the number in [0, 1) of each key at its position of the output (SplitMix64)."""
    bits = keys + (positions.astype(np.uint64) + np.uint64(1)) * _STEP
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits = bits ^ (bits >> np.uint64(31))
    numbers: np.ndarray = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers
