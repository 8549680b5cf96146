"""Other architectures than Qwen2: heads of all kinds, sliding windows, learned positions, experts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rollout_worker.engine import EngineError
from tests.support.engine.engines import request, run_all, serving, update
from tests.support.engine.reference import Reference

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
LONGROPE = (
    'Phi3Config {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_parameters":'
    ' {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096,'
    ' "short_factor": [%s], "long_factor": [%s]}}'
) % ((", ".join(["1.0"] * 48),) * 2)
SLIDING = "gemma2, every other layer a window of 6"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, window of 6": ("MistralConfig", {**COMMON, "sliding_window": 6}),
    SLIDING: (
        "Gemma2Config",
        {**COMMON, "sliding_window": 6, "query_pre_attn_scalar": 8},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**COMMON, "sliding_window": 6, "query_pre_attn_scalar": 8, "num_hidden_layers": 6},
    ),
    "gpt2, learned positions": ("GPT2Config", {**GPT2, "bos_token_id": 0, "eos_token_id": 1}),
    "phi3, fused projections": ("Phi3Config", COMMON),
    "mixtral, experts": ("MixtralConfig", {**COMMON, "num_local_experts": 4}),
    "afmoe, which gives its mask by name": (
        "AfmoeConfig",
        {
            **COMMON,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 6,
        },
    ),
    "qwen3 moe": (
        "Qwen3MoeConfig",
        {**COMMON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}


def make(name: str, folder: Path, seed: int) -> Path:
    """Save a random model, drawn wide so that outputs tell models apart."""
    config_class, fields = MODELS[name]
    config = getattr(transformers, config_class)(**fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "sdpa") for name in MODELS if name != SLIDING), (SLIDING, "eager")],
)
async def test_batches_equal_transformers_own(tmp_path: Path, name: str, attention: str) -> None:
    first, second = make(name, tmp_path / "1", 1), make(name, tmp_path / "2", 2)
    rng = random.Random(1)
    prompts = [[rng.randrange(128) for _ in range(n)] for n in (1, 3, 9, 30, 31)]
    wanted = [request(f"r{i}", prompt, max_tokens=20) for i, prompt in enumerate(prompts)]
    flags = ("--attention", attention, "--prefill-tokens", "20")
    async with serving(first, *flags) as (engine, _):
        outputs = await run_all(engine, wanted)
        judge = Reference(first, attention)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == judge.greedy(prompt, 20)
            assert output.logprobs == pytest.approx(
                judge.raw_logprobs(prompt, output.token_ids), abs=1e-4
            )
        await update(engine, second)
        updated = await run_all(engine, wanted)
    judge = Reference(second, attention)
    for prompt, output in zip(prompts, updated, strict=True):
        assert output.token_ids == judge.greedy(prompt, 20)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("T5Config", "not a causal language model"),
        ("MambaConfig", "no cache"),
        ("Qwen3NextConfig", "no cache for layers of the kind linear_attention"),
        ("Gemma2Config", "caps its attention's logits, .* --attention eager"),
        (LONGROPE, "beyond 4096 tokens .*: set --max-length 4096"),
    ],
)
async def test_models_that_it_can_not_serve_as_they_are_are_refused(
    tmp_path: Path, config: str, words: str
) -> None:
    name, _, fields = config.partition(" ")
    getattr(transformers, name)(**json.loads(fields or "{}")).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=words):
        async with serving(tmp_path):
            pass
