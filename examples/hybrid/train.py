"""Teach a tiny model to count, by GRPO, with the engine in the trainer's own process.

    python examples/hybrid/train.py                                       # on a CPU, by itself
    python train.py --pool counting --namespace demo --model /models/tiny # in a pod of the pool

Alone, the engine serves the very tensors that the optimizer changes, so the two take turns: sample, put the
worker to sleep, learn, hand the weights over, wake. As a member of a pool of mode Hybrid only the
operator makes weights serve: the trainer publishes them to all members, its own worker among them.

The prompt is a digit, a sample is eight more, and the reward is the share of them that continue the count
from the digit before. Each group of samples of one prompt is compared with itself (GRPO, arXiv:2402.03300).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rollout_client import RolloutPool
from rollout_worker.embedded import Worker

TEN, PROMPTS, GROUP, LENGTH, TOLERANCE = 10, 32, 8, 8, 1e-3


def make_model(folder: Path) -> Path:
    """Write a checkpoint of random weights whose vocabulary is the ten digits."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TEN,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def sample(pool: RolloutPool, digits: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """Return [B, 1 + LENGTH] digits, and the logprobs [B, LENGTH] of those that were sampled."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, TEN, (PROMPTS,), generator=generator).repeat_interleave(GROUP)
    sampling = {"max_tokens": LENGTH, "ignore_eos": True, "allowed_token_ids": digits}
    results = pool.generate_many([[digits[each]] for each in starts.tolist()], sampling=sampling)
    drawn = torch.tensor([[digits.index(token) for token in each.token_ids] for each in results])
    logprobs = torch.tensor([each.logprobs for each in results])
    return torch.cat([starts[:, None], drawn], dim=1), logprobs


def logprobs_of(model: Any, digits: list[int], counted: Tensor) -> Tensor:
    """Return the same logprobs as the trainer's model has them, with gradients."""
    allowed = torch.tensor(digits)
    logits = model(input_ids=allowed[counted]).logits[:, :-1, allowed]
    logprobs: Tensor = logits.log_softmax(-1).gather(-1, counted[:, 1:, None]).squeeze(-1)
    return logprobs


def learn(model: Any, optimizer: torch.optim.Optimizer, digits: list[int], counted: Tensor) -> None:
    """Take one step of the policy gradient."""
    rewards = score(counted).view(-1, GROUP)
    gains = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    loss = -(logprobs_of(model, digits, counted) * gains.view(-1, 1)).mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def score(counted: Tensor) -> Tensor:
    """Return [B]: the share of digits that are one above the digit before."""
    return ((counted[:, 1:] - counted[:, :-1]) % TEN == 1).float().mean(1)


@contextmanager
def alone(model: Path) -> Iterator[tuple[Worker, RolloutPool]]:
    """Run a worker by itself, and a client of it, on ports that nobody else can reach."""
    near = {"control_host": "127.0.0.1", "data_host": "127.0.0.1", "auth": "none"}
    with (
        Worker(model=model, data_port=0, control_port=0, **near) as worker,
        RolloutPool.from_urls([worker.data_url]) as pool,
    ):
        yield worker, pool


@contextmanager
def member(model: Path, name: str, namespace: str) -> Iterator[tuple[Worker, RolloutPool]]:
    """Run a worker that is a member of a pool, and a client of the whole pool."""
    with (
        Worker(model=model, pool=name, namespace=namespace, auth="kubernetes") as worker,
        RolloutPool.from_cluster(name, namespace) as pool,
    ):
        pool.wait_serving()
        yield worker, pool


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", type=Path, help="checkpoint; default: a tiny one, made for each run"
    )
    parser.add_argument("--digits", type=int, nargs=TEN, metavar="ID", help="ids of 0 to 9")
    parser.add_argument("--pool", help="the RolloutReplica that this pod is a member of")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or make_model(Path(scratch))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        digits = args.digits or list(range(TEN) if args.model is None else range(20, 30))
        where = alone(folder) if args.pool is None else member(folder, args.pool, args.namespace)
        with where as (worker, pool):
            for step in range(1, args.steps + 1):
                began = time.monotonic()
                counted, sampled = sample(pool, digits, step)
                with torch.no_grad():
                    off = float((logprobs_of(model, digits, counted) - sampled).abs().max())
                if off > TOLERANCE:
                    raise SystemExit(f"step {step}: logprobs differ by {off:.2g} from the engine's")
                if args.pool is None:
                    with worker.turn():
                        learn(model, optimizer, digits, counted)
                        worker.hand_over(step, model, labels={"step": str(step)})
                else:
                    learn(model, optimizer, digits, counted)
                    pool.publish_weights(step, tensors=model)
                print(
                    f"step {step:3}  reward {float(score(counted).mean()):.3f}  |dlogp| {off:.1e}"
                    f"  {time.monotonic() - began:.2f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
