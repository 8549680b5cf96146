"""Draw a token for each row of a batch, as its request asks.

Order of application: bias and allowed ids, penalties, `min_tokens`, grammar, temperature, `min_p`, `top_k`,
`top_p`. A token is found by inverting the cumulative distribution at one random number, the same on
every device. SGLang does not use its own sampler: its penalties ignore the prompt and forget the output when a
request is retracted, and its logprobs ignore truncation.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout_common.wire.rich_requests import mask_row_bytes
from rollout_worker.engines.grammars.grammar_state import GrammarMasks, apply_masks

from .batch_rows import SampledRows
from .truncation import truncate_logits

MIN_LOGPROB = -104.0
"""Below it a probability is 0 in float32, so that no sampler draws the token: a large negative bias excludes it."""

LikeliestTokens = dict[int, tuple[Tensor, Tensor]]
"""Ids [k] and logprobs [k] of the most likely tokens, by row."""

BLOCK_TOKENS = 128
"""Tokens in a block that is summed before one is drawn; usual vocabularies are multiples of it."""

PIECE_LOGITS = 1 << 25
"""Logits computed at once: a step takes memory for a few copies of them in float32, however many rows it has."""


@dataclass(slots=True)
class DrawRecords:
    """The records of one batch, by row; `allowed` [V] bool: which tokens could be drawn."""

    top: LikeliestTokens = field(default_factory=dict)
    allowed: dict[int, Tensor] = field(default_factory=dict)

    def note_allowed(self, rows: list[int], start: int, logprobs: Tensor) -> None:
        """Note what could be drawn in these rows of `logprobs` [B, V]; `start`: the batch's number of the first row."""
        if rows:
            at = torch.tensor(rows, device=logprobs.device)
            possible = (logprobs[at] > MIN_LOGPROB).cpu()
            self.allowed |= {start + row: part for row, part in zip(rows, possible, strict=True)}


def pack_mask_row(allowed: Tensor) -> tuple[int, bytes]:
    """Return how many tokens `allowed` [V] has, and its row of a `wire.SamplingMask`."""
    count, size = int(allowed.sum()), len(allowed)
    length = mask_row_bytes(count, size)
    if length == 0:
        return count, b""
    if length == 4 * count:
        return count, allowed.nonzero().squeeze(1).to(torch.int32).numpy().tobytes()
    bits = torch.nn.functional.pad(allowed, (0, -size % 8)).view(-1, 8).to(torch.uint8)
    weights = 1 << torch.arange(8, dtype=torch.uint8)
    return count, (bits * weights).sum(dim=1, dtype=torch.uint8).numpy().tobytes()


def draw_tokens(
    logits: Tensor,
    rows: SampledRows,
    temperatures: Tensor,
    positions: Tensor,
    records: DrawRecords | None = None,
    grammars: GrammarMasks | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw a token for each row of `logits` [B, V]; return tokens [B] and their logprobs [B].

    `temperatures` [B, 1], 1 for greedy rows; `positions` [B] of each row's last token. `records` gets what
    rows ask for besides. `grammars`: which tokens those of some rows allow.
    """
    pieces = rows.split_rows(max(1, PIECE_LOGITS // logits.shape[1]))
    sizes = [len(piece) for piece in pieces]
    columns = (torch.split(each, sizes) for each in (logits, temperatures, positions))
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    parts = zip(pieces, starts, zip(*columns, strict=True), strict=True)
    drawn = [
        _draw_piece(
            piece,
            start,
            records,
            grammars and grammars.within_rows(start, start + len(piece)),
            *part,
        )
        for piece, start, part in parts
    ]
    if len(drawn) == 1:
        return drawn[0]
    tokens, logprobs = zip(*drawn, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _draw_piece(
    rows: SampledRows,
    start: int,
    records: DrawRecords | None,
    grammars: GrammarMasks | None,
    logits: Tensor,
    temperatures: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    work = logits.to(torch.float32, copy=rows.raw_rows is not None)
    norm = work.logsumexp(dim=-1) if rows.raw_rows is not None else None
    rows.edit_logits(work, positions)
    if grammars is not None:
        apply_masks(work, grammars)
    # Shifting by the maximum first keeps the quotient in range however small the temperature.
    work.sub_(work.amax(dim=-1, keepdim=True)).div_(temperatures)
    if rows.truncated_rows is not None:
        truncate_logits(work, *rows.truncated_rows)
    logprobs = work.log_softmax(dim=-1)
    del work
    if rows.all_greedy:
        tokens = logprobs.argmax(dim=-1)
    else:
        tokens = pick_tokens(logprobs.exp(), _random_numbers(rows, positions))
        if rows.any_greedy:
            tokens = torch.where(rows.greedy_rows, logprobs.argmax(dim=-1), tokens)
    chosen = _values_at(logprobs, tokens)
    if rows.raw_rows is not None and norm is not None:
        chosen = torch.where(rows.raw_rows, _values_at(logits, tokens).float() - norm, chosen)
    rows.count_tokens(tokens)
    if records is not None:
        records.note_allowed(rows.mask_rows, start, logprobs)
        if rows.top_rows:
            found = _likeliest_tokens(rows, logprobs, logits, norm)
            records.top |= {start + row: each for row, each in found.items()}
    return tokens, chosen


def _likeliest_tokens(
    rows: SampledRows, logprobs: Tensor, logits: Tensor, norm: Tensor | None
) -> LikeliestTokens:
    """Return the most likely tokens of the rows that ask for them, with logprobs of the row's kind."""
    at = torch.tensor([row for row, _ in rows.top_rows], device=logprobs.device)
    part = logprobs[at]
    if rows.raw_rows is not None and norm is not None:
        raw = logits[at].float() - norm[at].unsqueeze(1)
        part = torch.where(rows.raw_rows[at].unsqueeze(1), raw, part)
    most = max(count for _, count in rows.top_rows)
    values, ids = part.topk(min(most, part.shape[1]), dim=-1)
    return {
        row: (ids[place, :count], values[place, :count])
        for place, (row, count) in enumerate(rows.top_rows)
    }


def _values_at(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _random_numbers(rows: SampledRows, positions: Tensor) -> Tensor:
    """Return the random number of each row, [B] in [0, 1): by its seed if it has one."""
    seeded = rows.seeded_rows
    # If all rows have a seed, torch's generator is not used: it may be a trainer's.
    make = torch.empty if seeded is not None and len(seeded[0]) == len(rows) else torch.rand
    numbers = make(len(rows), dtype=torch.float64, device=positions.device)
    if seeded is not None:
        at, seeds = seeded
        numbers[at] = seeded_uniform(seeds, positions[at] + 1 - rows.prompt_lengths[at])
    return numbers


def pick_tokens(weights: Tensor, numbers: Tensor) -> Tensor:
    """Return the tokens [B] at `numbers` [B] of the cumulated `weights` [B, V].

    Sums whole blocks first and cumulates only the chosen one, in double precision: on a CPU many
    times faster than `torch.multinomial`, which draws a number for every token.
    """
    count = weights.shape[1]
    if count % BLOCK_TOKENS:
        weights = torch.nn.functional.pad(weights, (0, -count % BLOCK_TOKENS))
    blocks = weights.reshape(len(weights), -1, BLOCK_TOKENS)
    tokens = find_tokens(blocks, blocks.sum(dim=-1).double().cumsum(dim=-1), numbers)
    return tokens.clamp_(max=count - 1)  # higher only if the weights were not finite


def seeded_uniform(seeds: Tensor, produced: Tensor) -> Tensor:
    """Return numbers in [0, 1) for these seeds [S] at these lengths of the output [S].

    A number is a hash of both (SplitMix64), hence the same whatever else is in the batch, on every device, and
    after a prefix was computed again.
    """
    mixed = _mix_bits(_mix_bits(seeds) + produced.long() * -7046029254386353131)
    return ((mixed >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _mix_bits(x: Tensor) -> Tensor:
    x = (x ^ _shift_unsigned(x, 30)) * -4658895280553007687
    x = (x ^ _shift_unsigned(x, 27)) * -7723592293110705685
    return x ^ _shift_unsigned(x, 31)


def _shift_unsigned(x: Tensor, bits: int) -> Tensor:
    """Shift to the right, without extending the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def find_tokens(blocks: Tensor, cumulative: Tensor, numbers: Tensor) -> Tensor:
    """Return for each row the token at its number of the cumulative distribution, [B].

    Args:
        blocks: [B, N, size] masses of the tokens, block by block.
        cumulative: [B, N] their sums up to the end of each block, double.
        numbers: [B] in [0, 1), double.
    """
    size = blocks.shape[2]
    target = _clamp_below(numbers.unsqueeze(1) * cumulative[:, -1:], cumulative[:, -1:])
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inner = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, size)).squeeze(1)
    inner = inner.double().cumsum(dim=-1)
    place = torch.searchsorted(inner, _clamp_below(target - before, inner[:, -1:]), right=True)
    return (block * size + place.clamp_(max=size - 1)).squeeze(1)


def _clamp_below(target: Tensor, total: Tensor) -> Tensor:
    """Keep below the total, so that the first sum above the target belongs to a possible token."""
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
