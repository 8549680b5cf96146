"""Teach a tiny model that sees to count red squares, by GRPO, with two workers on this machine.

    python examples/vision/squares.py

A picture has four squares, red or blue; a sample is one token, and the reward is 1 if it is the number of red ones.
Each sample is compared with the mean of its picture's (GRPO, arXiv:2402.03300, without the division by the deviation). The model is of Qwen2-VL's kind with
random weights, so its vision part learns, too. A picture goes to each worker once; after that its hash does.
"""

from __future__ import annotations

import argparse
import base64
import io
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor

from rollout_client import GenerateRequest, RolloutPool
from rollout_client.local import LocalPlan, LocalWorkers

PAD, VIDEO, BEGIN, END, QUESTION = range(5)
ANSWERS = (5, 6, 7, 8)
"""Ids that stand for one to four red squares."""
PICTURES, GROUP, EPOCHS = 60, 8, 4
SIDE = 28
"""Pixels of a square, which becomes one token: 2 x 2 patches of 14 x 14."""
RED, BLUE = (220, 30, 30), (30, 30, 220)


def make_model() -> transformers.Qwen2VLForConditionalGeneration:
    """Return a model of Qwen2-VL's kind with random weights."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 16,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
        "eos_token_id": None,
    }
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    return transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=PAD,
            video_token_id=VIDEO,
            vision_start_token_id=BEGIN,
            vision_end_token_id=END,
            tie_word_embeddings=False,
        )
    )


def draw_picture(reds: Sequence[bool]) -> Image.Image:
    """Return a picture of four squares, each red or blue."""
    squares = np.array([RED if red else BLUE for red in reds], np.uint8).reshape(2, 2, 3)
    return Image.fromarray(squares.repeat(SIDE, axis=0).repeat(SIDE, axis=1))


def ask_about(picture: Image.Image, prompt: Sequence[int]) -> GenerateRequest:
    """Return the request for a group of answers; only answers can be sampled."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return GenerateRequest(
        token_ids=prompt,
        multimodal={"images": [{"data": base64.b64encode(file.getvalue()).decode()}]},
        sampling={"n": GROUP, "max_tokens": 1, "allowed_token_ids": ANSWERS, "ignore_eos": True},
        logprobs="sampling",
    )


def learn(
    model: transformers.Qwen2VLForConditionalGeneration,
    optimizer: torch.optim.Optimizer,
    seen: dict[str, Tensor],
    taken: Tensor,
    sampled: Tensor,
    gains: Tensor,
) -> float:
    """Take some clipped steps of the policy gradient; return the largest difference of logprobs from the workers'.

    `seen`: what the model takes, of N pictures. `taken`: [N, GROUP], places in `ANSWERS`. `sampled`: their logprobs as the
    workers say them. `gains`: their advantages.
    """
    differences = []
    for _ in range(EPOCHS):
        logits = model(**seen).logits[:, -1, list(ANSWERS)]
        ratio = (logits.log_softmax(-1).gather(1, taken) - sampled).exp()
        differences.append(float(ratio.detach().log().abs().max()))
        loss = -torch.min(ratio * gains, ratio.clamp(0.8, 1.28) * gains).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return differences[0]


def make_processor() -> transformers.models.qwen2_vl.Qwen2VLImageProcessorPil:
    """Return what makes patches of pictures, for the trainer and for the model's folder."""
    sizes = {"shortest_edge": SIDE**2, "longest_edge": 16 * SIDE**2}
    return transformers.models.qwen2_vl.Qwen2VLImageProcessorPil(size=sizes)


def write_model(model: transformers.Qwen2VLForConditionalGeneration, folder: Path) -> None:
    """Write what a pool loads."""
    model.save_pretrained(folder)
    make_processor().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors lets nobody else read it


@contextmanager
def open_pool(
    args: argparse.Namespace, model: transformers.Qwen2VLForConditionalGeneration
) -> Iterator[RolloutPool]:
    """Yield the pool that was named, or one of workers on this machine."""
    if args.pool:
        with RolloutPool.from_cluster(args.pool, args.namespace) as pool:
            pool.wait_serving(seconds=300)
            yield pool
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_model(model, Path(scratch, "model"))
        plan = LocalPlan("hf", f"{scratch}/model", args.replicas, args.port)
        with LocalWorkers(plan, Path(scratch), print) as workers:
            workers.wait_until_ready()
            with workers.connect() as pool:
                yield pool


def train(
    pool: RolloutPool, model: transformers.Qwen2VLForConditionalGeneration, steps: int
) -> list[float]:
    """Train for so many steps; return the mean rewards."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    processor = make_processor()
    prompt = [BEGIN, *[PAD] * 4, END, QUESTION]
    ids = torch.tensor([prompt] * PICTURES)
    earned = []
    pool.acquire()
    for step in range(1, steps + 1):
        counts = torch.randint(1, 5, (PICTURES,))
        reds = torch.stack([torch.randperm(4) < count for count in counts])
        pictures = [draw_picture(each) for each in reds.tolist()]
        results = pool.generate_many([ask_about(each, prompt) for each in pictures])
        taken = torch.tensor([[o.token_ids[0] for o in each.outputs] for each in results])
        sampled = torch.tensor([[o.logprobs[0] for o in each.outputs] for each in results])
        taken -= ANSWERS[0]
        rewards = (taken == counts[:, None] - 1).float()
        seen = {"input_ids": ids, "mm_token_type_ids": (ids == PAD).int()}
        seen |= processor(images=pictures, return_tensors="pt")
        gains = rewards - rewards.mean(1, keepdim=True)
        off = learn(model, optimizer, seen, taken, sampled, gains)
        done = pool.publish_weights(step, tensors=model)
        earned.append(float(rewards.mean()))
        print(
            f"step {step:3}  reward {earned[-1]:.3f}  |dlogp| {off:.1e}"
            f"  published in {done.seconds:.2f} s",
            flush=True,
        )
    return earned


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8200, help="data port of the first worker")
    parser.add_argument(
        "--pool", help="a RolloutReplica instead, whose model is that of --write-models"
    )
    parser.add_argument("--namespace", help="of the RolloutReplica")
    parser.add_argument(
        "--write-models", type=Path, metavar="FOLDER", help="write the model, and end"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write table.csv there")
    args = parser.parse_args()
    model = make_model()
    if args.write_models:
        write_model(model, args.write_models / "sight")
        return
    with open_pool(args, model) as pool:
        earned = train(pool, model, args.steps)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        rows = "".join(f"{step},{reward:.4f}\n" for step, reward in enumerate(earned, 1))
        (args.out / "table.csv").write_text(f"step,reward\n{rows}")


if __name__ == "__main__":
    main()
