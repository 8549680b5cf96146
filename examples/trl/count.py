"""Teach a tiny model to count with TRL's GRPOTrainer, whose samples come from two workers on this machine.

    pip install '.[hf,client]' trl accelerate datasets
    python examples/trl/count.py

The prompt is a digit, a completion is eight more, and the reward is the share of them that continue the count from
the digit before. TRL does the rest; `TrlRollout` publishes its weights and samples.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

from rollout_client.integrations.trl import TrlRollout
from rollout_client.local import LocalPlan, LocalWorkers

TEN, PROMPTS, GROUP, LENGTH = 10, 32, 8, 8


def make_model() -> LlamaForCausalLM:
    """Return a model of random weights whose vocabulary is the ten digits."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return LlamaForCausalLM(LlamaConfig(vocab_size=TEN, num_attention_heads=4, **ends, **sizes))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of digits; it never ends a text, and what it pads with is masked."""
    vocabulary = {str(digit): digit for digit in range(TEN)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", eos_token="0")


def reward_counting(
    completion_ids: list[list[int]], prompts: list[str], **_: object
) -> list[float]:
    """Return the share of digits that follow the one before."""
    counted = torch.tensor(
        [[int(prompt), *ids] for prompt, ids in zip(prompts, completion_ids, strict=True)]
    )
    rewards: list[float] = ((counted[:, 1:] - counted[:, :-1]) % TEN == 1).float().mean(1).tolist()
    return rewards


class RewardLines(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Prints the reward of each step."""

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Print one line."""
        if "reward" in (row := more["logs"]):
            print(f"step {state.global_step:3}  reward {float(row['reward']):.3f}", flush=True)


def main(steps: int, replicas: int, port: int) -> None:
    """Train for so many steps."""
    model = make_model()
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(f"{scratch}/model")
        config = GRPOConfig(
            output_dir=f"{scratch}/trainer",
            max_steps=steps,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=LENGTH,
            generation_kwargs={"ignore_eos": True},
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            beta=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        )
        plan = LocalPlan("hf", f"{scratch}/model", replicas, port)
        with LocalWorkers(plan, Path(scratch), print) as workers:
            workers.wait_until_ready()
            with workers.connect() as pool:
                trainer = GRPOTrainer(
                    model=model,
                    reward_funcs=reward_counting,
                    args=config,
                    train_dataset=Dataset.from_list(
                        [{"prompt": str(n % TEN)} for n in range(steps * PROMPTS)]
                    ),
                    processing_class=make_tokenizer(),
                    rollout_func=TrlRollout(pool),
                )
                trainer.add_callback(RewardLines())
                trainer.remove_callback(PrinterCallback)
                trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000, help="data port of the first worker")
    main(**vars(parser.parse_args()))
