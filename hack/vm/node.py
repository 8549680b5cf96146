#!/usr/bin/env python3
"""What runs on each of two machines that a network joins; hack/vm/two_nodes.py starts it there.

Both serve a model with a worker. The trainer's machine, too,

1. publishes weights from its memory, and each machine serves them;
2. asks for the other machine's power to be cut in the middle of the next ones: its own worker has to get them all the
   same, and requests have to go on;
3. asks for the other machine to boot, which knows nothing then: it has to get the weights before it serves;
4. publishes to both again.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollout_client import DirectOptions, RolloutPool
from rollout_client.steering.steering_protocol import Published, PublishProgress

JOB, MODEL = Path("/job"), Path("/var/lib/model")
FLAGS = {
    "engine": "hf", "model": MODEL, "data-port": 8000, "control-port": 8001, "weights-port": 8002,
    "auth": "token", "auth-token-file": JOB / "token", "log-format": "text",
}  # fmt: skip
START_SECONDS = 1500.0
"""Of both workers: without hardware virtualization, libraries are read for minutes."""
NOTICE_SECONDS = 60.0
"""Of a publish beyond its duration with both machines, when one is dead."""


def main() -> int:
    role, *addresses = sys.argv[1:]
    make_model().save_pretrained(MODEL)
    flags = [text for name, value in FLAGS.items() for text in (f"--{name}", str(value))]
    # Its log is on the terminal.
    with subprocess.Popen([sys.executable, "-m", "rollout_worker", "serve", *flags]) as worker:
        if role == "worker":
            return worker.wait()
        try:
            train(addresses)
        finally:
            worker.kill()
    return 0


def make_model() -> LlamaForCausalLM:
    """Return a model of 200 MB, the same on both machines."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, num_attention_heads=8, **sizes))


def train(addresses: list[str]) -> None:
    urls = [f"http://{address}:8000" for address in addresses]
    options = DirectOptions(token=(JOB / "token").read_text())
    model = make_model()
    with RolloutPool.from_urls(urls, direct=options) as pool:
        with step("both workers serve"):
            pool.wait_serving(2, seconds=START_SECONDS)
        pool.acquire()
        with step("weights are pushed over TCP to both") as took:
            expect(publish(pool, model, 1).replicas == 2, "two replicas")
        check_tokens(pool, version=1, replicas=2)
        full = took[0]
        with step("the other machine loses its power during the next push") as took:
            done = publish(pool, model, 2, cut_at=0.3)
            expect(done.replicas == 1, "one replica")
            assert done.report is not None
            failed = [each.error for each in done.report.replicas.values() if each.error]
            expect(len(failed) == 1, f"a report of the one that is dead, not {failed}")
        expect(took[0] < full + NOTICE_SECONDS, f"{took[0]:.0f} s, where {full:.0f} s were enough")
        check_tokens(pool, version=2, replicas=1)
        (JOB / "boot").touch()
        with step("the other machine boots and gets the weights"):
            pool.wait_serving(2, seconds=START_SECONDS)
        check_tokens(pool, version=2, replicas=2)
        with step("both get the next ones"):
            expect(publish(pool, model, 3).replicas == 2, "two replicas")
        check_tokens(pool, version=3, replicas=2)
    print("two machines: all is well", flush=True)


def publish(
    pool: RolloutPool, model: LlamaForCausalLM, version: int, cut_at: float | None = None
) -> Published:
    """Publish other weights than before; ask for the power to be cut once this share of the bytes has come."""
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.001)

    def note(progress: PublishProgress) -> None:
        if cut_at is not None and progress.bytes_done > cut_at * (progress.bytes_total or 1):
            (JOB / "cut").touch()

    done = pool.publish_weights(version, tensors=model, progress=note)
    assert done.report is not None
    seconds = ", ".join(f"{phase} {took:.1f}" for phase, took in done.report.seconds.items())
    print(f"  {done.message}; seconds: {seconds}", flush=True)
    return done


def check_tokens(pool: RolloutPool, version: int, replicas: int) -> None:
    """Every replica that serves answers with this version."""
    with step(f"tokens of version {version} from {replicas}"):
        results = pool.generate_many(
            [[1, 2, 3]] * 8, sampling={"max_tokens": 4, "ignore_eos": True}
        )
        versions = {span.version for each in results for span in each.output.weights}
        expect(versions == {version}, f"version {version}, not {versions}")
        served = {report.replica for each in results for report in each.attempts if report.tokens}
        expect(len(served) == replicas, f"{replicas} replicas, not {served}")


@contextmanager
def step(what: str) -> Iterator[list[float]]:
    """Print how long a step took, and put it into the list."""
    took: list[float] = []
    began = time.monotonic()
    yield took
    took.append(time.monotonic() - began)
    print(f"{what:<60} {took[0]:6.1f} s", flush=True)


def expect(true: bool, what: str) -> None:
    if not true:
        sys.exit(f"expected: {what}")


if __name__ == "__main__":
    sys.exit(main())
