"""Teach a tiny model to ask a calculator instead of guessing: GRPO (grpo.py) over several turns.

    python tools.py --pool policy --namespace demo --model MODEL --weights FOLDER …

A user asks for the sum of two numbers. The policy either answers directly or writes
`<calc>17+25</calc>`; then the calculator replies in a message of its own, and it is the policy's
turn again. The reward is 1 if the last answer is the sum, else 0: nothing rewards the call itself.

A random model would never write a call by chance, so it first imitates a teacher (plain supervised
learning, version 1 of the weights) that guesses half of the time and asks otherwise. It then earns
about 0.5; only the policy gradient over whole conversations raises the reward further.

A ledger next to the conversations keeps what the engines answered. At the end, check.py compares the
two, token by token, and `report.json` says what it found.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import grpo
from calculator import (
    ALPHABET,
    END,
    TEMPLATE,
    TOOL,
    Question,
    calculate,
    call,
    expression_of,
    shown,
)
from check import Conversation, Report, Turn, check
from grpo import GROUP, TEMPERATURE, Policy, Samples
from publishing import Publisher, with_transport
from rollout_client import GenerateResult, RolloutPool, RolloutRequest
from rollout_worker.schemas import RolloutBatch, ToolResponse, from_batch, to_batch

PROMPTS, TURNS, ANSWER = 16, 3, 20
TAUGHT, AT_ONCE, TAUGHT_RATE, RATE = 180, 64, 4e-3, 5e-4
LENGTH = 200


class Task:
    """The conversations of one training run.

    Args:
        tokenizer: the model's, with the task's template.
        publisher: publishes to the pool that answers.
    """

    def __init__(self, tokenizer: Any, publisher: Publisher) -> None:
        self.tokenizer, self.publisher = tokenizer, publisher
        self.asked: list[Question] = []
        self.conversations: list[Conversation] = []
        self.sampling = {
            "max_tokens": ANSWER,
            "temperature": TEMPERATURE,
            "allowed_token_ids": allowed(tokenizer),
        }

    def draw(self, seed: int) -> Samples:
        """Hold `PROMPTS` groups of `GROUP` conversations, all at once."""
        dice = random.Random(seed)
        questions = [Question.drawn(dice) for _ in range(PROMPTS)]
        asked = [question for question in questions for _ in range(GROUP)]
        names = [f"{seed}.{number}" for number in range(len(asked))]
        with ThreadPoolExecutor(len(asked)) as together:
            held = list(together.map(self.converse, asked, names))
        batch = to_batch([each.request for each in held], pad_token_id=self.tokenizer.pad_token_id)
        self.asked += asked
        # The check at the end is of what the batch contains, not of what went into it.
        both = zip(held, from_batch(batch), strict=True)
        self.conversations += [replace(each, request=request) for each, request in both]
        return samples_of(batch)

    def converse(self, question: Question, name: str) -> Conversation:
        """Hold one conversation to the end, whatever happens to workers and weights."""
        oldest = self.publisher.committed
        request, turns = self.begin(question, name), list[Turn]()
        floor = oldest
        while True:
            prompt = request.get_generation_prompt_ids(self.tokenizer).tolist()
            # Older weights never sample a later turn, even if it goes to another worker.
            result = self.publisher.pool.generate(
                prompt,
                session_id=name,
                sampling=self.sampling,
                logprobs="sampling",
                epoch=floor[0],
                min_version=floor[1],
            )
            turns.append(Turn(prompt, result))
            floor = max(floor, *((w.epoch, w.version) for w in result.output.weights))
            expression = expression_of(self.text(result))
            if expression is None or len(turns) == TURNS:
                break
            self.answer(request, result, [call(expression, f"{name}.{len(turns)}")])
            result_of_tool = ToolResponse(text=calculate(expression))
            request.add_tool_response_messages(self.tokenizer, [result_of_tool])
        self.answer(request, result)
        request.finalize(self.tokenizer, {"sum": [question.reward(self.text(result))]})
        return Conversation(question, request, turns, oldest, self.publisher.identity)

    def begin(self, question: Question, name: str) -> RolloutRequest:
        """Return a conversation with its first message."""
        return RolloutRequest.from_messages(
            [{"role": "user", "content": question.text}],
            self.tokenizer,
            tools=[TOOL],
            max_prompt_len=LENGTH,
            max_response_len=LENGTH,
            max_model_len=LENGTH,
            request_id=name,
        )

    def text(self, result: GenerateResult) -> str:
        """Return an answer without the token that ends it."""
        text: str = self.tokenizer.decode(result.token_ids)
        return text.removesuffix(END)

    def answer(
        self, request: RolloutRequest, result: GenerateResult, calls: Sequence[Any] = ()
    ) -> None:
        """Append an answer; one with a call consists of nothing else."""
        request.add_output(
            self.tokenizer,
            result.output,
            logprobs_of=result.logprobs_of,
            content="" if calls else None,
            tool_calls=calls,
        )

    def imitate(self, policy: Policy, seed: int) -> None:
        """Warm up: let the policy imitate the teacher, then lower its learning rate."""
        dice, parameters = random.Random(seed), list(policy.model.parameters())
        policy.optimizer = torch.optim.Adam(parameters, lr=TAUGHT_RATE)
        for _ in range(TAUGHT):
            seen = [self.lesson(dice) for _ in range(AT_ONCE)]
            batch = to_batch(seen, pad_token_id=self.tokenizer.pad_token_id)
            samples = samples_of(batch)
            policy.step(-policy.logprobs(samples)[samples.sampled].mean())
        policy.optimizer = torch.optim.Adam(parameters, lr=RATE)

    def lesson(self, dice: random.Random) -> RolloutRequest:
        """Return one of the teacher's conversations."""
        question = Question.drawn(dice)
        request = self.begin(question, "lesson")
        for text in shown(question, dice):
            ids = self.tokenizer.convert_tokens_to_ids([*text, END])
            request.add_assistant_message(self.tokenizer, content_ids=ids)
            if (expression := expression_of(text)) is not None:
                answer = ToolResponse(text=calculate(expression))
                request.add_tool_response_messages(self.tokenizer, [answer])
        return request


def allowed(tokenizer: Any) -> list[int]:
    """Return the ids that the policy may sample: one per character, and the end."""
    ids: list[int] = tokenizer.convert_tokens_to_ids([*sorted(set(ALPHABET)), END])
    return ids


def samples_of(batch: RolloutBatch) -> Samples:
    """Return a batch as the trainer takes it."""
    made, prompt = batch.batch, batch.batch["prompts"].shape[1]

    def whole(name: str, value: float = 0) -> torch.Tensor:
        return torch.nn.functional.pad(made[name], (prompt, 0), value=value)

    earned = [sum(scores.get("sum", ())) for scores in batch.non_tensor_batch["reward_scores"]]
    return Samples(
        tokens=made["input_ids"],
        positions=made["position_ids"],
        attended=made["attention_mask"].bool(),
        sampled=whole("response_mask").bool(),
        logprobs=whole("rollout_log_probs"),
        identity=torch.stack([whole("weights_epoch", -1), whole("weights_version", -1)], dim=-1),
        stale_kv=whole("stale_kv"),
        rewards=torch.tensor(earned),
    )


def write_report(report: Report, rows: Sequence[grpo.Row], versions: int, folder: Path) -> None:
    """Write `report.json` and print it.

    Raises:
        SystemExit: There are faults, or tokens whose logprobs could not be checked.
    """
    unchecked = sum(row.unchecked_tokens for row in rows)
    worst = max(row.logprob_difference for row in rows)
    found = {**vars(report), "versions": versions, "unchecked_tokens": unchecked}
    found |= {"logprob_difference": worst, "faults": report.faults[:20]}
    found["number_of_faults"] = len(report.faults)
    (folder / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"checked token by token: {json.dumps(found)}", flush=True)
    if report.faults or unchecked:
        raise SystemExit(f"{len(report.faults)} faults, {unchecked} unchecked tokens")


def main() -> None:
    """Command line."""
    args = with_transport(grpo.arguments(__doc__ or "", steps=20)).parse_args()
    disable_progress_bar()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.chat_template = TEMPLATE
    with RolloutPool.from_cluster(args.pool, args.namespace) as pool:
        pool.wait_serving(seconds=grpo.DEADLINE)
        run(pool, tokenizer, args)


def run(pool: RolloutPool, tokenizer: Any, args: argparse.Namespace) -> None:
    """Train over a serving pool, check, and write the results."""
    policy = Policy(args.model, allowed(tokenizer))
    publisher = Publisher(pool, policy, args.weights, args.mount, args.transport)
    task = Task(tokenizer, publisher)
    task.imitate(policy, args.seed)
    publisher.publish()
    rows = grpo.train(publisher, task.draw, args.steps, args.seed)
    grpo.write(rows, args.out, "GRPO: asking a calculator", chance=0)
    report = check(task.asked, task.conversations, tokenizer)
    write_report(report, rows, publisher.version, args.out)


if __name__ == "__main__":
    main()
