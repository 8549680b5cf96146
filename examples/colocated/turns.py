"""Teach a tiny model to count on accelerators that the trainer shares with its pool (see ../grpo).

    python turns.py --pool shared --namespace demo --model MODEL --weights FOLDER …

One step: the pool samples; then the trainer has its turn: the pool sleeps, the trainer learns on the
devices and publishes; then the pool wakes with the new weights. So samples are never stale, and nobody's
memory is on a device together with the other's.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

import grpo
import train
from grpo import Policy
from publishing import Publisher, with_transport
from rollout_client import RolloutPool


@contextmanager
def resident() -> Iterator[None]:
    """Have memory of the devices for a block: where a trainer on GPUs moves its model to them and back.

    This one learns on the CPU. A fake device of the local cluster is a file, and a lock on it
    stands for memory.
    """
    with ExitStack() as marks:
        for device in sorted(Path("/dev").glob("gpu-*")):
            fcntl.flock(marks.enter_context(device.open()), fcntl.LOCK_SH)
        yield


def main() -> None:
    """Command line."""
    parser = with_transport(grpo.arguments(__doc__ or "", steps=10))
    parser.add_argument("--digits", type=int, nargs=train.TEN, default=range(20, 30), metavar="ID")
    parser.add_argument(
        "--lend",
        action="store_true",
        help="lend the weights to the engine that sleeps on the same devices, instead of sending or writing them",
    )
    args = parser.parse_args()
    disable_progress_bar()
    torch.manual_seed(args.seed)
    policy = Policy(args.model, args.digits)
    with RolloutPool.from_cluster(args.pool, args.namespace) as pool:
        pool.wait_serving(seconds=grpo.DEADLINE)
        # By `auto` into the main memory of workers that sleep: they commit it as they wake.
        publisher = Publisher(pool, policy, args.weights, args.mount, args.transport)
        for step in range(1, args.steps + 1):
            began = time.monotonic()
            samples = train.sample(pool, args.digits, args.seed + step)
            sampled = time.monotonic()
            with pool.turn() as turn:
                had = time.monotonic()
                with resident():
                    policy.learn(samples)
                    if args.lend:  # from device to device, while the trainer's tensors are there
                        publisher.publish(turn)
                if not args.lend:
                    publisher.publish()
                learned = time.monotonic()
            identity = sorted(set(map(tuple, samples.identity[samples.sampled].tolist())))
            print(
                f"step {step:3}  reward {float(samples.rewards.mean()):.3f}  weights {identity}  "
                f"sampled in {sampled - began:.2f} s, turn after {had - sampled:.2f} s, learned and "
                f"published in {learned - had:.2f} s, pool serves after {time.monotonic() - learned:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
