"""Teach a tiny model to count, by GRPO, with two workers on this machine: no cluster, no root, no GPU.

    python examples/local/count.py

The prompt is a digit, a sample is eight more, and the reward is the share of them that continue the count from the
digit before. Each group of samples of one prompt is compared with itself (GRPO, arXiv:2402.03300). Each step ends
with new weights, straight into the workers' memory.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollout_client.local import LocalPlan, LocalWorkers

TEN, PROMPTS, GROUP, LENGTH = 10, 32, 8, 8


def make_model() -> LlamaForCausalLM:
    """Return a model of random weights whose vocabulary is the ten digits."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TEN, num_attention_heads=4, bos_token_id=None, eos_token_id=None, **sizes
        )
    )


def main(steps: int, replicas: int, port: int) -> None:
    """Train for so many steps."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    sampling = {"max_tokens": LENGTH, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(f"{scratch}/model")
        plan = LocalPlan("hf", f"{scratch}/model", replicas, port)
        with LocalWorkers(plan, Path(scratch), print) as workers:
            workers.wait_until_ready()
            with workers.connect() as pool:
                pool.acquire()
                for step in range(1, steps + 1):
                    prompts = torch.randint(0, TEN, (PROMPTS,)).repeat_interleave(GROUP).tolist()
                    results = pool.generate_many([[each] for each in prompts], sampling=sampling)
                    # [B, 1 + LENGTH]: the prompt and its continuation.
                    counted = torch.tensor(
                        [[first, *r.token_ids] for first, r in zip(prompts, results, strict=True)]
                    )
                    rewards = ((counted[:, 1:] - counted[:, :-1]) % TEN == 1).float().mean(1)
                    groups = rewards.view(-1, GROUP)
                    gains = (groups - groups.mean(1, keepdim=True)) / (
                        groups.std(1, keepdim=True) + 1e-4
                    )
                    logprobs = model(input_ids=counted).logits[:, :-1].log_softmax(-1)
                    taken = logprobs.gather(-1, counted[:, 1:, None]).squeeze(-1)
                    sampled = torch.tensor([r.logprobs for r in results])
                    off = float((taken.detach() - sampled).abs().max())
                    loss = -(taken * gains.view(-1, 1)).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    done = pool.publish_weights(step, tensors=model)
                    print(
                        f"step {step:3}  reward {float(rewards.mean()):.3f}  |dlogp| {off:.1e}"
                        f"  published in {done.seconds:.2f} s",
                        flush=True,
                    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000, help="data port of the first worker")
    main(**vars(parser.parse_args()))
