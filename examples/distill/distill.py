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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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


@contextmanager
def open_pools(
    args: argparse.Namespace, models: dict[str, LlamaForCausalLM]
) -> Iterator[tuple[RolloutPool, RolloutPool]]:
    """Yield the pools of teacher and student: those that were named, or one worker on this machine for each."""
    with ExitStack() as stack:
        if args.student:
            names = (args.teacher, args.student)
            pools = [RolloutPool.from_cluster(name, args.namespace) for name in names]
            for pool in pools:
                stack.enter_context(pool).wait_serving(seconds=300)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_models(models, folder)
            workers = []
            for index, name in enumerate(models):
                (folder / f"logs-{name}").mkdir()
                plan = LocalPlan("hf", str(folder / name), port=args.port + 10 * index)
                made = LocalWorkers(plan, folder / f"logs-{name}", print)
                workers.append(stack.enter_context(made))
            for each in workers:
                each.wait_until_ready()
            pools = [stack.enter_context(each.connect()) for each in workers]
        yield pools[0], pools[1]


def write_models(models: dict[str, LlamaForCausalLM], folder: Path) -> None:
    """Write each into a folder of its name."""
    for name, model in models.items():
        model.save_pretrained(folder / name)
        (folder / name / "model.safetensors").chmod(0o644)  # safetensors lets nobody else read it


def distil(
    teacher: RolloutPool, student: RolloutPool, model: LlamaForCausalLM, steps: int
) -> list[float]:
    """Distil for so many steps; return the shares of the student's samples that count on."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    sampling = {"max_tokens": LENGTH, "ignore_eos": True}
    shares = []
    student.acquire()
    for step in range(1, steps + 1):
        prompts = torch.randint(0, TEN, (PROMPTS,)).tolist()
        results = student.generate_many([[p] for p in prompts], sampling=sampling)
        divergence, counted = train_step(model, optimizer, results, prompts, teacher)
        student.publish_weights(step, tensors=model)
        shares.append(counted)
        print(f"step {step:3}  divergence {divergence:.3f}  counts {counted:.3f}", flush=True)
    return shares


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--port", type=int, default=8100, help="data port of the teacher")
    parser.add_argument("--student", help="a RolloutReplica instead of a worker on this machine")
    parser.add_argument("--teacher", help="the other RolloutReplica")
    parser.add_argument("--namespace", help="of both; their models are those of --write-models")
    parser.add_argument(
        "--write-models", type=Path, metavar="FOLDER", help="write both models, and end"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write table.csv there")
    args = parser.parse_args()
    models = {"teacher": make_teacher(), "student": make_model(0)}
    if args.write_models:
        write_models(models, args.write_models)
        return
    with open_pools(args, models) as (teacher, student):
        shares = distil(teacher, student, models["student"], args.steps)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        rows = "".join(f"{step},{share:.4f}\n" for step, share in enumerate(shares, 1))
        (args.out / "table.csv").write_text(f"step,reward\n{rows}")


if __name__ == "__main__":
    main()
