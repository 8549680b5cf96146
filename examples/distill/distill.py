"""Distil a teacher into a student on the student's own samples, with a pool for each on this machine.

    python examples/distill/distill.py

The teacher counts: after a digit it writes the next one. It is a frozen pool, which only scores. The student begins with
random weights and samples; the teacher tells its most likely tokens at each position of the sample, and the student
lowers its reverse KL divergence from the teacher over them (on-policy distillation, arXiv:2306.13649). Each
step ends with new weights in the student's pool.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rollout_client import GenerateResult, RolloutPool
from rollout_client.local import LocalPlan, LocalWorkers

TEN, PROMPTS, LENGTH, TOP = 10, 64, 8, 8
LESSONS = 80


def make_model(seed: int) -> LlamaForCausalLM:
    """Return a model of random weights whose vocabulary is the ten digits."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TEN, num_attention_heads=4, bos_token_id=None, eos_token_id=None, **sizes
        )
    )


def make_teacher() -> LlamaForCausalLM:
    """Return a model that has learned to count."""
    teacher = make_model(1)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    counted = (torch.arange(TEN)[:, None] + torch.arange(LENGTH + 1)) % TEN
    for _ in range(LESSONS):
        optimizer.zero_grad()
        teacher(input_ids=counted, labels=counted).loss.backward()
        optimizer.step()
    return teacher


def ask_teacher(teacher: RolloutPool, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the teacher's most likely tokens after each prompt of one token: ids and logprobs [B, LENGTH, TOP]."""
    scored = teacher.generate_many(
        texts,
        sampling={"max_tokens": 0},
        prompt_logprobs=[1, LENGTH + 1],
        top_logprobs=TOP,
        logprobs="raw",
    )
    tops = [each.prompt_logprobs.top_logprobs for each in scored]
    return torch.tensor([t.token_ids for t in tops]), torch.tensor([t.logprobs for t in tops])


def reverse_kl(student: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean divergence of the student [B, T, V] from the teacher [B, T, k], over the teacher's tokens.

    Both are renormalised over these, so that it is 0 only where they agree.
    """
    mine = student.gather(-1, ids).log_softmax(-1)
    return (mine.exp() * (mine - teacher.log_softmax(-1))).sum(-1).mean()


def train_step(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    results: Sequence[GenerateResult],
    prompts: Sequence[int],
    teacher: RolloutPool,
) -> tuple[float, float]:
    """Take a step towards the teacher on these samples; return the divergence before it, and the share that counts on."""
    texts = [[first, *r.token_ids] for first, r in zip(prompts, results, strict=True)]
    ids, logprobs = ask_teacher(teacher, texts)
    sampled = torch.tensor(texts)
    divergence = reverse_kl(model(input_ids=sampled).logits[:, :-1], ids, logprobs)
    optimizer.zero_grad()
    divergence.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    counts = (sampled[:, 1:] - sampled[:, :-1]) % TEN == 1
    return float(divergence.detach()), float(counts.float().mean())


def main(steps: int, port: int) -> None:
    """Distil for so many steps."""
    model = make_model(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    sampling = {"max_tokens": LENGTH, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        workers = []
        for index, (name, made) in enumerate((("teacher", make_teacher()), ("student", model))):
            made.save_pretrained(folder / name)
            (folder / f"logs-{name}").mkdir()
            plan = LocalPlan("hf", str(folder / name), port=port + 10 * index)
            workers.append(LocalWorkers(plan, folder / f"logs-{name}", print))
        with workers[0], workers[1]:
            for each in workers:
                each.wait_until_ready()
            with workers[0].connect() as teacher, workers[1].connect() as student:
                student.acquire()
                for step in range(1, steps + 1):
                    prompts = torch.randint(0, TEN, (PROMPTS,)).tolist()
                    results = student.generate_many([[p] for p in prompts], sampling=sampling)
                    divergence, counted = train_step(model, optimizer, results, prompts, teacher)
                    student.publish_weights(step, tensors=model)
                    print(
                        f"step {step:3}  divergence {divergence:.3f}  counts {counted:.3f}",
                        flush=True,
                    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--port", type=int, default=8100, help="data port of the teacher")
    main(**vars(parser.parse_args()))
