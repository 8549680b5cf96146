"""Make a tiny Qwen2 model from a seed: weights, tokenizer, chat template; nothing is downloaded.

    python hack/tinymodel.py OUT --seed 1                    a model folder
    python hack/tinymodel.py OUT --seed 2 --weights-only     a version of it: weights and manifest
    python hack/tinymodel.py OUT --experts 128 --untied      a mixture of experts, of Qwen3's kind

The same arguments give the same bytes. Seeds differ only in the weights, so seed 2 is what a
trainer would publish after seed 1. Weights are drawn wide (N(0, 0.2)), else a random model's
greedy output repeats one token forever, and two seeds could not be distinguished. A model that is to be
trained needs less (`--std 0.05`).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>\n{% for tool in tools %}"
    "{{ tool | tojson }}\n{% endfor %}</tools>\nCall one by"
    ' <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.get('tool_calls', []) %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STEMS = (
    "weight token policy reward cluster worker engine prompt sample gradient value batch learn "
    "roll train serve wake sleep stage commit light water stone river green quick small write "
    "think answer question number letter paper window garden mountain morning evening"
)
ENDINGS = ("", "s", "er", "ing", "ed", "ly", "ness", "less", "ful", "able", "ward", "ment")
MARKS = (".", ",", "?", "!", ";", ":", " -", "\n")


@dataclass(frozen=True)
class Shape:
    """Size of the model; the defaults make 3.3 MB. `experts`: 0 makes Qwen2, any other number Qwen3-MoE."""

    vocab: int = 4096
    hidden: int = 128
    intermediate: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    max_length: int = 2048
    tied: bool = True
    dtype: str = "float32"
    std: float = 0.2
    experts: int = 0


EXPERTS_A_TOKEN = 8


def make_model(out: Path, seed: int, shape: Shape | None = None) -> None:
    shape = shape or Shape()
    make_weights(out, seed, shape)
    _tokenizer(shape.vocab).save(str(out / "tokenizer.json"))
    end, _, turn = SPECIALS
    _write(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": turn,
            "pad_token": end,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.max_length,
            "chat_template": CHATML,
        },
    )
    ids = {name: index for index, name in enumerate(SPECIALS)}
    eos = [ids[turn], ids[end]]
    _write(out / "generation_config.json", {"bos_token_id": ids[end], "eos_token_id": eos})


def make_weights(out: Path, seed: int, shape: Shape | None = None) -> str:
    """Write the weights, their manifest and the model's config; return the root hash."""
    import torch
    from safetensors.torch import save_file

    from rollout_worker.sources.checkpoint_files import write_manifest

    shape = shape or Shape()
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _draw(name, size, shape.std, generator).to(getattr(torch, shape.dtype))
        for name, size in sorted(_sizes(shape).items())
    }
    out.mkdir(parents=True, exist_ok=True)
    file = out / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes it private; a worker of another user must read it
    _write(out / "config.json", _config(shape))
    return write_manifest(out)


def _sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, head = shape.hidden, shape.hidden // shape.heads
    kv = head * shape.kv_heads
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, hidden),
        **_inner_sizes(shape),
    }
    for name, width in (("q", hidden), ("k", kv), ("v", kv)):
        layer[f"self_attn.{name}_proj.weight"] = (width, hidden)
        if not shape.experts:
            layer[f"self_attn.{name}_proj.bias"] = (width,)
    if shape.experts:
        layer |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
    sizes = {"model.embed_tokens.weight": (shape.vocab, hidden), "model.norm.weight": (hidden,)}
    if not shape.tied:
        sizes["lm_head.weight"] = (shape.vocab, hidden)
    for index in range(shape.layers):
        sizes |= {f"model.layers.{index}.{name}": size for name, size in layer.items()}
    return sizes


def _inner_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the sizes of a layer's part after attention."""
    one = {
        "gate_proj.weight": (shape.intermediate, shape.hidden),
        "up_proj.weight": (shape.intermediate, shape.hidden),
        "down_proj.weight": (shape.hidden, shape.intermediate),
    }
    if not shape.experts:
        return {f"mlp.{name}": size for name, size in one.items()}
    sizes = {
        f"mlp.experts.{number}.{name}": size
        for number in range(shape.experts)
        for name, size in one.items()
    }
    return {"mlp.gate.weight": (shape.experts, shape.hidden), **sizes}


def _kind(shape: Shape) -> dict[str, object]:
    """Return the part of the configuration that depends on the kind of model."""
    if not shape.experts:
        return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": shape.hidden // shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": EXPERTS_A_TOKEN,
        "moe_intermediate_size": shape.intermediate,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _config(shape: Shape) -> dict[str, object]:
    return {
        **_kind(shape),
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.max_length,
        "tie_word_embeddings": shape.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "attention_dropout": 0.0,
        "bos_token_id": SPECIALS.index("<|endoftext|>"),
        "eos_token_id": SPECIALS.index("<|im_end|>"),
        "dtype": shape.dtype,
    }


def _draw(name: str, size: tuple[int, ...], std: float, generator: Any) -> Any:
    import torch

    noise = torch.empty(size).normal_(0, std, generator=generator)
    return noise + 1 if "norm" in name else noise


def _corpus() -> list[str]:
    """Return invented sentences with enough distinct words to fill a small vocabulary."""
    rng = random.Random(7)
    stems = STEMS.split()
    words = [a + b for a in stems for b in ENDINGS] + [a + b for a in stems for b in stems]
    sentences = []
    for _ in range(6000):
        chosen = rng.choices(words, k=rng.randint(4, 12))
        sentences.append(" ".join(chosen) + rng.choice(MARKS) + str(rng.randint(0, 999)))
    return sentences


def _tokenizer(vocab: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def _write(file: Path, value: dict[str, object]) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--weights-only", action="store_true", help="no tokenizer: a version")
    parser.add_argument("--untied", action="store_true", help="an output head of its own")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--std", type=float, default=Shape.std, help="width of the weights")
    for name in (
        "vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "max_length", "experts",
    ):  # fmt: skip
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=getattr(Shape, name))
    args = vars(parser.parse_args())
    out, seed, weights_only = args.pop("out"), args.pop("seed"), args.pop("weights_only")
    shape = Shape(tied=not args.pop("untied"), **args)
    begin = time.monotonic()
    make = make_weights if weights_only else make_model
    make(out, seed, shape)
    print(f"{out}: seed {seed}, {time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
