"""From a request to what vLLM takes: what is refused, and what is translated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rollout_worker.engine import EngineRequest, Grammar, InvalidRequest
from rollout_worker.engines.grammars.grammar_checker import grammar_text
from rollout_worker.engines.picture_model import (
    PictureInputs,
    PictureModel,
    PlacedPicture,
    banned_tokens,
    check_pictures,
    place_pictures,
)
from rollout_worker.engines.request_checks import check_model_limits, check_temperature, stop_ids
from rollout_worker.engines.vllm.ranks.draw_masks import MASKS_ASK

MIN_TEMPERATURE = 0.01
"""Below it vLLM silently draws at it; 0 is greedy."""
MAX_TEMPERATURE = 2.0
"""Above it vLLM refuses."""

MAX_LOGIT_BIAS = 1e18
"""Larger biases, and repetition penalties below 1 / it, are clamped: no other logit counts next to them
either way, and a bias over a penalty over a temperature stays in the range of float32."""

MAX_LISTED_TOKENS = 1024
"""How many tokens a request may allow, or bias, where the sampler is bounded (vLLM 0.32)."""
MAX_STOP_TOKENS = 128
"""How many tokens may end an output that has `min_tokens`, where the sampler is bounded."""

UNREAD_STREAM_INTERVAL = 32
"""How many tokens come at a time of an output that nobody reads as it grows: with a quick model, a wake-up
for each token costs more than making it."""


@dataclass(frozen=True, slots=True)
class VllmModel:
    """What it takes to check and translate requests.

    `bounded`: its sampler has arrays of fixed length for what a request asks of single tokens. `pictures`: how it
    takes them.
    """

    max_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer: Any | None
    bounded: bool = False
    pictures: PictureModel | None = None


def check_request(request: EngineRequest, model: VllmModel) -> None:
    """Refuse what can't be served: `InvalidRequest` names the field and the fix."""
    check_model_limits(request, model)
    check_temperature(request, "vLLM", MIN_TEMPERATURE, MAX_TEMPERATURE)
    if request.grammar is not None and request.logprobs == "raw":
        raise InvalidRequest(
            "logprobs",
            "vLLM has no 'raw' logprobs with structured, as it masks the logits that it takes them from: ask for"
            " 'sampling', or leave structured out",
        )
    check_pictures(request, model.pictures)
    if not model.bounded:
        return
    # Beyond what the sampler's arrays hold, vLLM's core raises, and ends.
    sampling = request.sampling
    allowed = len(sampling.allowed_token_ids or ())
    banned = len(banned_tokens(model.pictures))
    stops = len(stop_ids(sampling, model.eos_token_ids)) if sampling.min_tokens else 0
    for field, found, most, why in (
        ("sampling.allowed_token_ids", allowed, MAX_LISTED_TOKENS, ""),
        ("sampling.logit_bias", len(sampling.logit_bias), MAX_LISTED_TOKENS - banned, ""),
        ("sampling.stop_token_ids", stops, MAX_STOP_TOKENS, " with min_tokens, EOS included"),
    ):
        if found > most:
            raise InvalidRequest(
                field, f"vLLM takes at most {most} tokens here{why}, not {found}: send fewer"
            )


def to_sampling_params(request: EngineRequest, model: VllmModel) -> Any:
    """Return vLLM's sampling parameters for a checked request."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as Params

    sampling = request.sampling
    allowed = sampling.allowed_token_ids
    biases = {
        token: max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, bias))
        for token, bias in sampling.logit_bias.items()
    }
    biases |= dict.fromkeys(banned_tokens(model.pictures), -MAX_LOGIT_BIAS)
    return Params(
        # vLLM makes at least one token; that of a request for scores alone is dropped.
        max_tokens=sampling.max_tokens or 1,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=max(1 / MAX_LOGIT_BIAS, sampling.repetition_penalty),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=biases or None,
        allowed_token_ids=None if allowed is None else list(allowed),
        # EOS ids are among them, so that vLLM itself knows of none: within `min_tokens` it would
        # withhold them even from a request that ignores them.
        stop_token_ids=sorted(stop_ids(sampling, model.eos_token_ids)),
        ignore_eos=True,
        seed=sampling.seed,
        logprobs=None if request.logprobs is None else request.top_logprobs,
        prompt_logprobs=None if request.scored is None else request.top_logprobs,
        flat_logprobs=True,
        structured_outputs=_to_structured_params(request.grammar),
        extra_args=dict(MASKS_ASK) if request.masks else None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        # Stop strings are found on our side, token by token.
        stream_interval=1 if request.streamed or sampling.stop else UNREAD_STREAM_INTERVAL,
        skip_clone=True,
    )


def _to_structured_params(grammar: Grammar | None) -> Any:
    """Return vLLM's parameters for a checked grammar, which it compiles by the same library."""
    from vllm.sampling_params import StructuredOutputsParams

    if grammar is None:
        return None
    kind, text = grammar_text(grammar.source)
    if kind == "choice":
        return StructuredOutputsParams(choice=list(grammar.source.choice or ()))
    return StructuredOutputsParams(**{"json" if kind == "json_schema" else kind: text})


def skip_grammar_validation() -> None:
    """Keep vLLM from compiling each request's grammar in our event loop: it was checked in a process of its own."""
    from vllm.v1.structured_output import backend_guidance

    backend_guidance.validate_guidance_grammar = lambda *_, **__: None


def leave_ends_to_requests() -> None:
    """Keep vLLM from adding the model's EOS ids to those that `min_tokens` withholds, also where they are ignored.

    A request's stop ids have them unless it ignores them.
    """
    from vllm import SamplingParams

    SamplingParams.update_from_generation_config = lambda *_, **__: None


class VllmPictures(PictureInputs):
    """What the model's processor makes of pictures, as vLLM's multimodal input.

    vLLM's own way from a picture to its input would expand the placeholders, which are expanded already, a second time,
    without an error.
    """

    def make_input(self, request: EngineRequest, salt: str) -> Any:
        """Return vLLM's input for a request with pictures; blocks. `salt`: of the prefixes that it may share."""
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import PlaceholderRange

        placed = place_pictures(request, self._pictures)
        return mm_input(
            list(request.token_ids),
            self._make_items(placed),
            # vLLM keeps features by this name, and trusts it: it is of the content, and of the weights in the salt.
            {"image": [f"{each.picture.ref} {salt}" for each in placed]},
            {
                "image": [
                    PlaceholderRange(offset=each.offset, length=each.length) for each in placed
                ]
            },
            cache_salt=salt,
        )

    def _make_items(self, placed: Iterable[PlacedPicture]) -> Any:
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

        items = []
        for each in placed:
            made = self.inputs_of(each.picture)
            fields: dict[str, Any] = {}
            if "image_grid_thw" in made:
                sizes = made["image_grid_thw"].prod(-1)
                fields["pixel_values"] = MultiModalFieldConfig.flat_from_sizes("image", sizes)
                fields["image_grid_thw"] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
            else:
                fields["pixel_values"] = MultiModalFieldConfig.batched("image")
            items += MultiModalKwargsItems.from_hf_inputs(made, fields)["image"]
        return MultiModalKwargsItems({"image": items})
