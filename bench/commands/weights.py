"""Commits of many small tensors in a rank of vLLM against vLLM's own loaders; the plan of many ranks' shards.

One rank, on a CPU, loads two versions of a mixture of experts in turn: first by vLLM's `reload_weights`,
which finds out each time where each tensor goes, then by the copies that were recorded. Both give the same tokens.
The plan says which rank writes which shard, of a 70B on 64 ranks and of a mixture of experts on 256; its baseline only reads
the names. A second publish of the same tensors makes no plan.
One version goes from the nodes of a trainer to many workers, each in a network namespace whose link has a rate in each direction;
the bound is what the link of one worker can carry. What all links can carry together, and those of the trainer, is never less.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.figures import Figure, Goal, Options, Result, figure
from bench.rigs import sharded_models, swarm
from bench.rigs.limited_links import explain_missing, limited_links
from rollout_client.steering.pushing.shards.node_parts import NodePart, node_parts, pack_layout
from rollout_client.steering.pushing.shards.shard_plan import (
    Names,
    Offer,
    offers_from_json,
    offers_to_json,
    share_out,
)
from rollout_common.transfer.layout import PushLayout
from tests.support.engine import vllm_loads
from tests.support.engine.engine_kinds import KINDS, read_program_answer
from tests.support.engine.tinymodels import script
from tests.support.unit.nixl_library import nixl_installed

EXPERTS = 128
LAYERS = 52
"""Which makes 20,439 tensors."""
COMMIT = Goal(median=0.3)
PLANS = {64: Goal(median=0.2), 256: Goal(median=5)}
"""By number of ranks: the goal for planning who writes what."""
SWARMS = ((1, 8, 20, 25e6), (1, 16, 20, 13e6), (4, 8, 20, 25e6), (8, 8, 20, 25e6))
"""Nodes of the trainer, workers, tensors of 8 MiB, bytes a second that a link carries in each direction."""
SHARE_OF_BOUND = 0.85
SECONDS = 900.0


def run(options: Options) -> Result:
    """Load versions in turn, plan, and send one to many workers."""
    if why := explain_missing():
        raise SystemExit(f"error: the links of workers can't be limited: {why}")
    layers, rounds = (4, 1) if options.quick else (LAYERS, 5)
    with tempfile.TemporaryDirectory() as folder:
        found = _measure(Path(folder), layers, options.count(rounds, 1))
    figures = _commit_figures(found, options)
    figures.append(_measure_plan(64, lambda rank: sharded_models.dense_offer(rank, 64), options))
    figures.append(_measure_plan(256, sharded_models.expert_offer, options))
    figures.append(_measure_plan(256, lambda rank: sharded_models.row_offer(rank, 256), options))
    figures += [_measure_swarm(*each, options) for each in SWARMS]
    figures.append(_measure_loop(options))
    figures.append(_measure_nixl(options))
    each = sorted(found["copies"])[len(found["copies"]) // 2] / found["tensors"]
    notes = [
        f"{each * 1e6:.0f} µs a tensor; {found['layers']} layers, {found['in_place']} of them copied in place, the"
        " others processed by vLLM as in its own loads.",
        f"The first commit of a rank is recorded: {found['recording']:.2f} s.",
        "In bfloat16, one thread, from the call of the rank until the weights are the model's. The staged bytes are a file in the page cache, mapped in the call.",
        "Many workers: a process each, with no engine, in a network namespace of its own; the kernel limits what its link carries, in each direction.",
    ]
    return Result("weights", "Many small tensors, many ranks, many workers", figures, notes)


def _commit_figures(found: dict[str, Any], options: Options) -> list[Figure]:
    """Return the figures of commits; all ways gave the same tokens."""
    made = found["outputs"]
    for version in ("first", "second"):
        ways = {str(made[f"{version} {way}"]) for way in ("own", "copies", "ring")}
        assert len(ways) == 1, "the tokens differ"
    return [
        figure(
            f"{found['tensors']} tensors, recorded copies",
            found["copies"],
            baseline=found["own"],
            against="vLLM's reload_weights",
            goal=None if options.quick else COMMIT,
        ),
        figure(
            "the same through a ring in main memory (not a GPU's figure)",
            found["ring"],
            baseline=found["copies"],
            against="recorded copies",
        ),
    ]


def _measure_swarm(nodes: int, workers: int, tensors: int, rate: float, options: Options) -> Figure:
    """Return the seconds until all workers have a version, against what one link can carry."""
    tensors = 2 if options.quick else tensors
    nbytes = tensors * swarm.TENSOR_BYTES
    bound = nbytes / rate
    rounds = options.count(5, 1)
    with limited_links(nodes + workers, rate) as links:
        took = [
            swarm.seconds_to_all(nodes, workers, tensors, nodes=links)[0] for _ in range(rounds)
        ]
    return figure(
        f"{nbytes / 1e6:.0f} MB from {nodes} to {workers} workers, {rate / 1e6:.0f} MB/s a link",
        took,
        baseline=[bound] * len(took),
        against="what one worker's link can carry",
        goal=None if options.quick else Goal(median=bound / SHARE_OF_BOUND),
    )


def _measure_loop(options: Options) -> Figure:
    """Return the seconds of its loop's processor in which a worker receives a GB: what threads can't share."""
    tensors = 16 if options.quick else 128
    nbytes = tensors * swarm.TENSOR_BYTES
    large, small = (
        [
            swarm.seconds_to_all(1, 1, tensors, most)[1] / nbytes * 1e9
            for _ in range(options.count(5, 1))
        ]
        for most in (1, nbytes)
    )
    return figure(
        "the loop of a worker that receives 1 GB in pieces of 4 MiB",
        large,
        baseline=small,
        against="pieces of 1 MiB, which the loop reads and hashes itself",
    )


def _measure_nixl(options: Options) -> Figure:
    """Return the seconds until a worker that reads by NIXL has a version."""
    tensors, times = 16 if options.quick else 128, options.count(5, 1)
    read, sent = list[float](), list[float]()
    with nixl_installed():
        for _ in range(times):
            read.append(swarm.seconds_to_all(1, 1, tensors, nixl=True)[0])
            sent.append(swarm.seconds_to_all(1, 1, tensors)[0])
    return figure(
        f"{tensors * swarm.TENSOR_BYTES / 1e9:.1f} GB to a worker by NIXL, over TCP on loopback",
        read,
        baseline=sent,
        against="by TCP",
    )


def _measure_plan(ranks: int, offer_of: Callable[[int], Offer], options: Options) -> Figure:
    """Return the seconds from the offers of all ranks, as they came, until all nodes know what to write.

    Rank 0 reads the offers, plans, and writes an order for each rank of its node and each other node; the lead of a node, all
    of which work at the same time, reads its order and finds the pieces that it will have. No network, no memory.
    """
    nodes = {rank: rank - rank % sharded_models.NODE_RANKS for rank in range(ranks)}
    own = [rank for rank in range(ranks) if nodes[rank] == 0]
    told = [json.dumps(offers_to_json({rank: offer_of(rank)})) for rank in range(ranks)]
    plan, names = [], []
    for _ in range(options.count(5, 1)):
        began = time.perf_counter()
        known: dict[Names, Names] = {}
        offers = {
            r: o for text in told for r, o in offers_from_json(json.loads(text), known).items()
        }
        specs, shares = share_out(offers)
        layout = PushLayout.plan(specs)
        parts, packed = node_parts(layout, shares, nodes), pack_layout(layout)
        orders = [parts[0].to_json([rank]) for rank in own]
        orders += [part.to_json(range(ranks)) for node, part in parts.items() if node]
        texts = [json.dumps({"layout": packed, "shares": order}) for order in orders]
        assert len(layout.pieces)
        assert NodePart.from_json(json.loads(texts[-1])).whole
        plan.append(time.perf_counter() - began)
        began = time.perf_counter()
        Counter(name for text in told for each in json.loads(text)["names"] for name in each)
        names.append(time.perf_counter() - began)
    return figure(
        f"plan of {ranks} ranks, {len(layout.tensors)} tensors, {layout.nbytes / 1e9:.0f} GB in {len(shares)} kinds",
        plan,
        baseline=names,
        against="to read the names and count them",
        goal=PLANS.get(ranks),
    )


def _measure(folder: Path, layers: int, rounds: int) -> dict[str, Any]:
    maker = script()
    sizes = {"hidden": 64, "intermediate": 32, "heads": 2, "layers": layers, "experts": EXPERTS}
    shape = maker.Shape(**sizes, tied=False, dtype="bfloat16")
    maker.make_model(folder / "one", 1, shape)
    maker.make_weights(folder / "two", 2, shape)
    program = (KINDS["vllm"].python, vllm_loads.__file__)
    found: dict[str, Any] = read_program_answer(
        [*program, str(folder / "one"), str(folder / "two"), str(rounds)],
        SECONDS, folder, PYTHONPATH=str(ROOT / "src"), OMP_NUM_THREADS="1",
    )  # fmt: skip
    return found
