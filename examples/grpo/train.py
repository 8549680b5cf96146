"""Teach a tiny model to count, by GRPO over a pool of rollout workers (see grpo.py).

    python train.py --pool policy --namespace demo --model MODEL --weights FOLDER …

The prompt is a digit, a sample is twelve tokens, and the reward is the share of them that continue
the count from the token before (8, 9, 0, 1, …). Only digits can be sampled, so an untrained model
earns 0.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

import grpo
from grpo import GROUP, TEMPERATURE, Policy, Samples
from lora import NAME, LoraPolicy, rank_of
from publishing import Publisher, with_transport
from rollout_client import GenerateResult, RolloutPool

TEN, PROMPTS, LENGTH = 10, 32, 12


def rewards(digits: Tensor) -> Tensor:
    """Return [B]: the share of digits [B, 1 + LENGTH] that are one above the previous digit."""
    return ((digits[:, 1:] - digits[:, :-1]) % TEN == 1).float().mean(1)


def sample(
    pool: RolloutPool, digits: Sequence[int], seed: int, adapter: str | None = None
) -> Samples:
    """Sample `PROMPTS` groups of `GROUP` from the pool; `digits`: the ids of 0 to 9."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, TEN, (PROMPTS,), generator=generator).repeat_interleave(GROUP)
    sampling = {
        "max_tokens": LENGTH,
        "temperature": TEMPERATURE,
        "allowed_token_ids": list(digits),
        "ignore_eos": True,
    }
    results: list[GenerateResult] = pool.generate_many(
        [[digits[start]] for start in starts.tolist()],
        sampling=sampling,
        logprobs="sampling",
        adapter=adapter,
    )
    digit_of = {token: digit for digit, token in enumerate(digits)}
    drawn = torch.tensor([[digit_of[token] for token in each.token_ids] for each in results])
    counted = torch.cat([starts[:, None], drawn], dim=1)
    weights = torch.tensor([list(_by_token(result)) for result in results])
    front = (1, 0)  # the prompt's one token was not sampled
    pad = torch.nn.functional.pad
    return Samples(
        tokens=torch.tensor(digits)[counted],
        positions=torch.arange(1 + LENGTH).expand(len(counted), -1),
        attended=torch.ones_like(counted, dtype=torch.bool),
        sampled=pad(torch.ones_like(drawn, dtype=torch.bool), front),
        logprobs=pad(torch.tensor([result.logprobs for result in results]), front),
        identity=pad(weights[..., :2], (0, 0, *front), value=-1),
        stale_kv=pad(weights[..., 2].bool(), front),
        rewards=rewards(counted),
    )


def _by_token(result: GenerateResult) -> Iterator[tuple[int, int, bool]]:
    for span in result.output.weights:
        yield from [(span.epoch, span.version, span.stale_kv)] * (span.end - span.start)


def main() -> None:
    """Command line."""
    parser = with_transport(grpo.arguments(__doc__ or "", steps=40))
    parser.add_argument("--digits", type=int, nargs=TEN, default=range(20, 30), metavar="ID")
    parser.add_argument(
        "--lora",
        type=rank_of,
        metavar="RANK",
        help="learn an adapter of this rank, and publish it alone: the pool's engine needs --enable-lora, if it is not hf",
    )
    args = parser.parse_args()
    if args.lora and args.transport == "files":
        parser.error("--lora: adapters go straight into the workers' memory")
    disable_progress_bar()
    torch.manual_seed(args.seed)
    with RolloutPool.from_cluster(args.pool, args.namespace) as pool:
        pool.wait_serving(seconds=grpo.DEADLINE)
        policy = (
            LoraPolicy(args.model, args.digits, args.lora)
            if args.lora
            else Policy(args.model, args.digits)
        )
        publisher = Publisher(pool, policy, args.weights, args.mount, args.transport)
        draw = partial(sample, pool, args.digits)
        if isinstance(policy, LoraPolicy):
            print(policy.report(), flush=True)
            publisher.publish()  # an adapter that changes nothing yet, for the first samples
            draw = partial(draw, adapter=NAME)
        rows = grpo.train(publisher, draw, args.steps, args.seed)
    grpo.write(rows, args.out, "GRPO: counting on", chance=1 / TEN)


if __name__ == "__main__":
    main()
