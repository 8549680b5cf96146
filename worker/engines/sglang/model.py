"""What the worker must know of the model, and what requests may ask of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout_common.wire import MAX_TOP_LOGPROBS, Capabilities
from rollout_worker.engine import EngineError, EngineRequest, TensorEntry, WeightsLayout
from rollout_worker.engines.grammars.grammar_checker import supports_grammars
from rollout_worker.engines.model_folder import (
    COMPUTE_DTYPES,
    checkpoint_dtype,
    checkpoint_layout,
    load_tokenizer,
    read_config,
    read_eos_ids,
    resolve_max_length,
)
from rollout_worker.engines.options import EngineOptions
from rollout_worker.engines.picture_model import (
    GRID_FAMILIES,
    PictureModel,
    check_pictures,
    read_picture_model,
)
from rollout_worker.engines.request_checks import (
    check_model_limits,
    check_route_size,
    check_temperature,
)
from rollout_worker.sources.checkpoint_files import open_source

from .sglang_records import read_experts

QUANTISATION_FIX = "use an unquantised checkpoint or block-wise fp8 (weight_block_size)"
FP8_DEVICES = (8, 9), (10, 0)
"""Compute capabilities, from the first to below the second, on which SGLang keeps block-wise fp8 as loaded."""

MIN_TEMPERATURE = 1e-6
"""Below it SGLang takes a request for greedy and its temperature for 1."""


@dataclass(frozen=True, slots=True)
class SglangModel:
    """What a model folder says.

    `quantisation`: its own entry, empty if it is not quantised. `experts`: how many a layer has, and a token goes to.
    `pictures`: how it takes them.
    """

    tokenizer: Any | None
    layout: WeightsLayout
    eos_token_ids: frozenset[int]
    max_length: int
    vocab_size: int
    dtype: str
    quantisation: Mapping[str, Any]
    experts: tuple[int, int] | None = None
    layers: int = 0
    pictures: PictureModel | None = None


def read_model(options: EngineOptions) -> SglangModel:
    """Read everything but the weights' bytes, and block; `EngineError` says what is wrong with the folder."""
    config = read_config(options.model)
    kind = config.get("model_type")
    config |= config.get("text_config") or {}
    source = open_source(options.model)
    # In the order in which SGLang looks.
    quantisation = config.get("quantization_config") or config.get("compression_config") or {}
    if not quantisation and (options.model / "hf_quant_config.json").exists():
        quantisation = {"quant_method": "modelopt"}
    try:
        vocab = int(config["vocab_size"])
    except (KeyError, ValueError) as error:
        raise EngineError("the model's config.json names no vocab_size") from error
    return SglangModel(
        tokenizer=load_tokenizer(options.model),
        layout=checkpoint_layout(source.entries, tied=bool(config.get("tie_word_embeddings"))),
        eos_token_ids=read_eos_ids(options.model, config.get("eos_token_id"), vocab),
        max_length=resolve_max_length(options.max_length, config.get("max_position_embeddings")),
        vocab_size=vocab,
        dtype=_model_dtype(options, config, source.entries),
        quantisation=quantisation,
        experts=read_experts(config),
        layers=int(config.get("num_hidden_layers") or 0),
        pictures=read_picture_model(options.model, kind) if kind in GRID_FAMILIES else None,
    )


def update_refusal(quantisation: Mapping[str, Any], device: tuple[int, int] | None) -> str | None:
    """Return why SGLang 0.5.23 can't update such weights, None where it is known to do it right.

    What it packs or requantises at the load it would have to undo before each update, and it does so for
    almost no kind: the update then fails or, worse, serves other numbers. `device`: compute capability, None
    if it is unknown or there is no GPU.
    """
    if not quantisation:
        return None
    method = quantisation.get("quant_method", "unknown")
    if method != "fp8":
        return f"the model is quantised by {method!r}, which SGLang packs at the load: {QUANTISATION_FIX}"
    if not quantisation.get("weight_block_size"):
        return f"the model is fp8 with a scale for each tensor, which SGLang reworks at the load: {QUANTISATION_FIX}"
    if device is None or FP8_DEVICES[0] <= device < FP8_DEVICES[1]:
        return None
    number = ".".join(map(str, device))
    return (
        f"on a GPU of compute capability {number} SGLang packs or requantises block-wise fp8 at the load: "
        "use an unquantised checkpoint, a GPU of capability 8.9 or 9.0 (Ada, Hopper), or vLLM"
    )


def _model_dtype(
    options: EngineOptions, config: dict[str, Any], entries: Sequence[TensorEntry]
) -> str:
    """Return the checkpoint's dtype; SGLang's own `auto` would halve float32."""
    if options.dtype != "auto":
        return options.dtype
    named = config.get("dtype") or config.get("torch_dtype")
    if named in COMPUTE_DTYPES.values():
        return str(named)
    return checkpoint_dtype(entries) or "auto"


def check_request(request: EngineRequest, model: SglangModel) -> None:
    """Refuse what can't be served: `InvalidRequest` names the field and the fix."""
    check_model_limits(request, model)
    check_temperature(request, "SGLang", MIN_TEMPERATURE)
    check_pictures(request, model.pictures)
    if model.experts is not None:
        count, top_k = model.experts
        check_route_size(request, model.layers * top_k * (1 if count <= 256 else 2))


def make_capabilities(model: SglangModel | None, facts: Mapping[str, Any]) -> Capabilities:
    """Return what the engine can do; `facts`: what the child reported of itself. Before it runs: None and nothing."""
    tokenizer = None if model is None else model.tokenizer
    routed = bool(facts.get("enable_return_routed_experts"))
    saver = bool(facts.get("enable_memory_saver", True))
    prefixes = not facts.get("disable_radix_cache", False)
    # With overlapping steps, a step's tokens are known only after the next one has begun, so that a pause
    # could not say which weights made the last ones: there is no `Keep` then.
    exact = bool(facts.get("disable_overlap_schedule", False))
    return Capabilities(
        logprobs=("sampling", "raw"),
        prompt_logprobs=True,
        top_logprobs=MAX_TOP_LOGPROBS,
        multimodal=model is not None and model.pictures is not None,
        structured=model is None or supports_grammars(tokenizer, model.eos_token_ids),
        return_routed_experts=model is None or (model.experts is not None and routed),
        return_sampling_mask=True,
        adapters=bool(facts.get("enable_lora")),
        # A request keeps the adapter that the child has taken it with.
        adapters_in_flight=("Drain", "Abort"),
        seed=True,
        priority=True,
        stop_strings=model is None or tokenizer is not None,
        in_flight=("Drain", "Abort", "Keep", "Recompute")
        if exact
        else ("Drain", "Abort", "Recompute"),
        sleep_levels=(1, 2) if saver else (),
        memory_release=saver,
        prefix_cache=prefixes,
        cache_salt=prefixes,
    )
