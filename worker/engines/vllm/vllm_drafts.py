"""Draft models of vLLM's speculative decoding, which a version of weights may bring along.

A version names a draft's tensors as the draft's own checkpoint does, below `draft/`. They are staged and committed with the
target's, in one pause. A draft decides how many tokens a step makes, never which: vLLM's rejection sampling keeps the target's
distribution. So a version without them leaves the draft as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rollout_worker.engine import EngineError, TensorEntry, WeightsLayout, WeightsRejected
from rollout_worker.engines.model_folder import checkpoint_layout, has_redundant_head
from rollout_worker.sources.checkpoint_files import open_source

DRAFT_PREFIX = "draft/"
WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")
"""Methods of `--speculative-config` that have no model."""
WITH_WEIGHTS = ("draft_model", "eagle", "eagle3")
"""Methods whose model has a checkpoint of its own."""


def check_drafts(config: Any, *, gang: bool) -> None:
    """Refuse drafts that no update could change; `gang`: the replica has several nodes.

    Raises:
        EngineError: Says which methods can be used.
    """
    drafts = config.speculative_config
    if drafts is None or drafts.method in WITHOUT_WEIGHTS:
        return
    if drafts.method not in WITH_WEIGHTS:
        raise EngineError(
            f"engine.args: --speculative-config: method {drafts.method!r} has weights that no update changes: use one"
            f" of {', '.join((*WITHOUT_WEIGHTS, *WITH_WEIGHTS))}, or leave it out"
        )
    if gang:
        raise EngineError(
            f"engine.args: --speculative-config: method {drafts.method!r} needs one node: a node fetches only what its"
            f" ranks read of the target. Use one of {', '.join(WITHOUT_WEIGHTS)}, or leave it out"
        )


def find_layout(config: Any, folder: Path, cancelled: Callable[[], bool]) -> WeightsLayout:
    """Return what a version of the model in a folder must hold, and may: a draft, and a head that is tied.

    vLLM takes a head that the checkpoint has besides its embedding for untied, loads both, and ties them again if they are
    equal; not on two ranks of a pipeline, nor quantised, nor next to several embeddings. A trainer that saves the model leaves
    such a head out.

    Raises:
        ReadCancelled: `cancelled` returned true.
    """
    model, source = config.model_config, open_source(folder)
    text = model.hf_text_config
    tied = bool(getattr(text, "tie_word_embeddings", False))
    if getattr(model, "word_embeddings_untied_by_checkpoint", False):
        several = bool(getattr(text, "hidden_size_per_layer_input", 0))
        apart = several or config.quant_config is not None
        apart = apart or config.parallel_config.pipeline_parallel_size > 1
        tied = not apart and has_redundant_head(source, cancelled)
    return add_draft(checkpoint_layout(source.entries, tied=tied), config)


def add_draft(layout: WeightsLayout, config: Any) -> WeightsLayout:
    """Return a layout in which a version may also bring the draft that vLLM is configured with."""
    drafts = config.speculative_config
    if drafts is None or drafts.method not in WITH_WEIGHTS:
        return layout
    entries = open_source(Path(drafts.draft_model_config.model)).entries
    brought = {DRAFT_PREFIX + entry.name: entry.spec for entry in entries}
    return replace(layout, optional={**layout.optional, **brought})


def check_whole(entries: Sequence[TensorEntry], layout: WeightsLayout) -> None:
    """Refuse a part of a draft.

    Raises:
        WeightsRejected: Names a tensor that is missing.
    """
    brought = {entry.name for entry in entries if is_of_draft(entry.name)}
    wanted = set(filter(is_of_draft, layout.optional))
    if brought and (missing := sorted(wanted - brought)):
        raise WeightsRejected(
            f"tensor {missing[0]!r} is missing: publish all of the draft, or nothing of it",
            tensor=missing[0],
        )


def is_of_draft(name: str) -> bool:
    """Return whether a tensor of a version is the draft's."""
    return name.startswith(DRAFT_PREFIX)


def load_draft(
    vllm_config: Any, draft: Any, tensors: Iterator[tuple[str, torch.Tensor]] | None
) -> None:
    """Load a draft in place: these tensors of a version, or (None) its own checkpoint; runs in vLLM's workers."""
    from vllm.config.utils import replace as replace_config
    from vllm.model_executor.model_loader.reload import inplace

    own = replace_config(
        vllm_config, model_config=vllm_config.speculative_config.draft_model_config
    )
    given = (
        None
        if tensors is None
        else ((n.removeprefix(DRAFT_PREFIX), t) for n, t in tensors if is_of_draft(n))
    )
    inplace.reload_weights(own, draft, given, None, is_checkpoint_format=True)


def mend_draft_sampling(*, cpu: bool) -> None:
    """Let requests with drafts have their own temperature, top p and top k; runs in vLLM's workers.

    vLLM (0.32) dies of top k in a step in which no request has a draft. On a CPU it spreads these values over the drafted positions
    by code that writes into a copy where they are not whole numbers, and reads memory that nothing was written to: logits
    are divided by anything.
    """
    from vllm.v1.sample import rejection_sampler

    truncate = rejection_sampler.apply_top_k_top_p

    def apply_top_k_top_p(logits: torch.Tensor, *limits: torch.Tensor | None) -> torch.Tensor:
        return truncate(logits, *limits) if len(logits) else logits

    rejection_sampler.apply_top_k_top_p = apply_top_k_top_p
    if cpu:
        rejection_sampler.expand_batch_to_tokens = _expand_batch_to_tokens


def _expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Return the value of each request [B] for each of its tokens, whose running count `cu_num_tokens` [B] is."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    spread = x.repeat_interleave(counts, output_size=num_tokens)
    return spread.masked_fill(spread == replace_from, replace_to)
