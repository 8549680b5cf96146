"""What each rank of a trainer has of two models of real size: names, shapes and shards, without any values.

*Dense*: the 723 tensors of a 70B, each cut by rows among all ranks (FSDP).
*Experts*: a mixture of experts of 1T parameters, 61 layers of 384 experts. An expert's tensors are whole, on four of 256
ranks (expert parallelism of 64). The other matrices are cut in eight on each node, by rows, or by columns where tensor
parallelism sums up (`o_proj`, `down_proj`); norms are on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from rollout_client.steering.plain_tensors import Spec
from rollout_client.steering.pushing.shards.shard_plan import Offer, TensorPart
from rollout_client.steering.pushing.shards.tensor_boxes import Box

NODE_RANKS = 8
EXPERT_RANKS = 64
EXPERTS = 384
COLUMNS = ("o_proj", "down_proj")


def dense_specs() -> Iterator[Spec]:
    """Yield the tensors of a 70B: 80 layers of 8192, 64 heads of which 8 have keys."""
    hidden, inner, keys = 8192, 28672, 1024
    rows = {"q": hidden, "k": keys, "v": keys, "o": hidden}
    for layer in range(80):
        at = f"model.layers.{layer}"
        for each, size in rows.items():
            yield f"{at}.self_attn.{each}_proj.weight", "BF16", (size, hidden)
        yield from _mlp(f"{at}.mlp", inner, hidden)
        for norm in ("input", "post_attention"):
            yield f"{at}.{norm}_layernorm.weight", "BF16", (hidden,)
    yield from _ends(128256, hidden)


def expert_specs() -> Iterator[Spec]:
    """Yield the tensors of a mixture of experts: 61 layers of 7168, the first without experts."""
    hidden, inner = 7168, 2048
    attention = {
        "q_a_proj": (1536, hidden),
        "q_a_layernorm": (1536,),
        "q_b_proj": (12288, 1536),
        "kv_a_proj_with_mqa": (576, hidden),
        "kv_a_layernorm": (512,),
        "kv_b_proj": (16384, 512),
        "o_proj": (hidden, 8192),
    }
    for layer in range(61):
        at = f"model.layers.{layer}"
        for each, shape in attention.items():
            yield f"{at}.self_attn.{each}.weight", "BF16", shape
        for norm in ("input", "post_attention"):
            yield f"{at}.{norm}_layernorm.weight", "BF16", (hidden,)
        if layer == 0:
            yield from _mlp(f"{at}.mlp", 18432, hidden)
            continue
        yield f"{at}.mlp.gate.weight", "BF16", (EXPERTS, hidden)
        yield f"{at}.mlp.gate.e_score_correction_bias", "F32", (EXPERTS,)
        for expert in range(EXPERTS):
            yield from _mlp(f"{at}.mlp.experts.{expert}", inner, hidden)
        yield from _mlp(f"{at}.mlp.shared_experts", inner, hidden)
    yield from _ends(163840, hidden)


def _mlp(at: str, inner: int, hidden: int) -> Iterator[Spec]:
    for name in ("gate_proj", "up_proj"):
        yield f"{at}.{name}.weight", "BF16", (inner, hidden)
    yield f"{at}.down_proj.weight", "BF16", (hidden, inner)


def _ends(tokens: int, hidden: int) -> Iterator[Spec]:
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", "BF16", (tokens, hidden)
    yield "model.norm.weight", "BF16", (hidden,)


def dense_offer(rank: int, ranks: int) -> Offer:
    return _grouped({spec: _cut(spec[2], 0, rank, ranks) for spec in dense_specs()})


def row_offer(rank: int, ranks: int) -> Offer:
    """Return what one rank has of the mixture of experts if every tensor is cut by rows among all ranks (FSDP)."""
    found: dict[Spec, Box | None] = {}
    for spec in expert_specs():
        size = spec[2][0]
        step = -(-size // ranks)
        begin, end = min(size, rank * step), min(size, rank * step + step)
        rest = ((0, each) for each in spec[2][1:])
        found[spec] = ((begin, end), *rest) if begin < end else None
    return _grouped(found)


def expert_offer(rank: int) -> Offer:
    found: dict[Spec, Box | None] = {}
    for spec in expert_specs():
        name, _, shape = spec
        if ".experts." in name:
            expert = int(name.split(".")[5])
            if expert * EXPERT_RANKS // EXPERTS == rank % EXPERT_RANKS:
                found[spec] = tuple((0, size) for size in shape)
        elif len(shape) == 1:
            found[spec] = tuple((0, size) for size in shape)
        else:
            dim = int(any(each in name for each in COLUMNS))
            found[spec] = _cut(shape, dim, rank % NODE_RANKS, NODE_RANKS)
    return _grouped(found)


def _cut(shape: tuple[int, ...], dim: int, at: int, ranks: int) -> Box:
    """Return the box of one of so many ranks; each dimension of these models can be cut so."""
    size = shape[dim] // ranks
    whole = [(0, each) for each in shape]
    whole[dim] = at * size, at * size + size
    return tuple(whole)


def _grouped(parts: Mapping[Spec, Box | None]) -> Offer:
    found: dict[TensorPart, list[str]] = defaultdict(list)
    for (name, dtype, shape), box in parts.items():
        found[TensorPart(dtype, shape, box)].append(name)
    return {part: tuple(sorted(names)) for part, names in found.items()}
