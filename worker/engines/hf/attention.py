"""Attention over the KV rows for a pass that mixes single tokens and pieces of prefixes.

A pass is flat, [1, N] tokens: first one token of each decoding row, then the pieces, so that all
linear layers compute real tokens only, however long each piece is. Attention alone depends on which tokens
belong together: the decoding rows are one block, and so is each piece. Heads that share keys
are folded into the queries instead of copying keys and values for each of them: with 14 heads
over 2 that is ten times as fast on a CPU.

transformers calls `attend_*` by the names under which they are registered; they find the `ForwardPass`
in a variable of the thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from rollout_worker.engine import EngineError

ATTENTION_PREFIX = "rollout_"
"""Our functions are registered under this and the name of the implementation that they replace."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """A part of a pass: tokens [begin, end) attend to the first `width` columns of `rows`.

    There are many rows with one token each (decoding), or one row with many tokens. `far`, `near`:
    what is added to the scores, [B, 1, C, width], in layers without and with a window; None where
    nothing is masked.
    """

    begin: int
    end: int
    rows: slice | Tensor
    width: int
    far: Tensor | None
    near: Tensor | None


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """The blocks of a pass, whether the first holds decoding rows, and which layers have a window."""

    pieces: tuple[AttentionBlock, ...]
    decodes: bool
    slides: Callable[[int], bool]


class _ThreadPass(threading.local):
    now: ForwardPass | None = None


current_pass = _ThreadPass()
"""The pass of this thread."""

AttentionFunction = Callable[..., tuple[Tensor, Any]]


def _attend_pass(
    module: Any, query: Tensor, key: Tensor, value: Tensor, one: AttentionFunction, **more: Any
) -> tuple[Tensor, None]:
    """Attend with queries [1, H, N, D] to layers [rows, G, capacity, D]; return [1, N, H, D]."""
    now = current_pass.now
    if now is None:
        raise RuntimeError("attention over KV rows was called outside a pass")
    slides = now.slides(module.layer_idx)
    parts = []
    for index, piece in enumerate(now.pieces):
        part = query[:, :, piece.begin : piece.end]
        if index == 0 and now.decodes:
            part = part.transpose(0, 2)  # [B, H, 1, D]: one token of each row
        keys, values = (layer[piece.rows, :, : piece.width] for layer in (key, value))
        mask = piece.near if slides else piece.far
        out, _ = one(module, part, keys, values, mask, **more)  # [B, C, H, D]
        parts.append(out.reshape(1, -1, *out.shape[2:]))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def attend_sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Replace transformers' sdpa."""
    _refuse_own_mask(attention_mask)
    odd = [name for name in ("position_bias", "s_aux", "softcap") if more.get(name) is not None]
    if odd:
        raise RuntimeError(f"attention with {odd[0]} needs --attention eager")
    return _attend_pass(module, query, key, value, _sdpa_grouped_heads, scaling=more.get("scaling"))


def _refuse_own_mask(mask: Tensor | None) -> None:
    """Refuse a mask: transformers makes none for us, so it is one that the model has computed."""
    if mask is not None:
        raise RuntimeError("attention with a mask that the model computes: use vllm or sglang")


def _sdpa_grouped_heads(
    _: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float | None
) -> tuple[Tensor, None]:
    batch, heads, count, width = query.shape
    shared = heads // key.shape[1]
    if mask is not None and count > 1 and shared > 1:
        mask = mask.repeat(1, 1, shared, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], shared * count, width),
        key,
        value,
        attn_mask=mask,
        scale=scaling,
    )
    return out.reshape(batch, heads, count, -1).transpose(1, 2), None


def attend_eager(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Replace eager attention; calls the model's own, which has its peculiarities."""
    _refuse_own_mask(attention_mask)
    own = sys.modules[type(module).__module__].eager_attention_forward
    more = {name: given for name, given in more.items() if name != "dropout"}
    return _attend_pass(module, query, key, value, own, **more)


def attention_implementation(model_class: Any, kind: str) -> str:
    """Return the implementation of attention to load a model with, or raise `EngineError`; `kind`: sdpa or eager."""
    able = model_class._supports_attention_backend
    if kind == "sdpa":
        able = able and model_class._supports_sdpa
    else:
        able = able and hasattr(sys.modules[model_class.__module__], "eager_attention_forward")
    if not able:
        raise EngineError(
            f"transformers does not let us replace the {kind} attention of {model_class.__name__}: "
            "try --attention eager (or sdpa), or serve it with the vllm or sglang engine"
        )
    return f"{ATTENTION_PREFIX}{kind}"


AttentionInterface.register(f"{ATTENTION_PREFIX}sdpa", attend_sdpa)
AttentionInterface.register(f"{ATTENTION_PREFIX}eager", attend_eager)
