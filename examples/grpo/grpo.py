"""GRPO in plain torch over a pool of rollout workers: what all tasks here share, to be read as one.

One step:

1. the pool samples the *next* batch while the trainer learns from this one: data is one step old,
   and updates arrive while requests run (`inFlight.policy: Keep`);
2. rewards, and advantages within each group of samples of one prompt (GRPO, arXiv:2402.03300);
3. two minibatches of the clipped policy gradient (PPO, arXiv:1707.06347); each token is weighted by
   min(pi_trainer / pi_rollout, 2), because the policy that learns is not quite the one that was
   sampled from (truncated importance sampling);
4. publish the new weights, straight into the workers' memory or as files (`--transport`), next step.

Every token says which weights sampled it. The trainer recomputes its logprob with those weights: the
two must agree to 1e-3 unless KV of older weights was reused. *Raw* logprobs must differ, or the
check proves nothing.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM

from publishing import Publisher

GROUP, TEMPERATURE, KEPT_VERSIONS, DEADLINE = 8, 0.8, 4, 300.0
CLIP_LOW, CLIP_HIGH, TRUNCATE, TOLERANCE = 0.2, 0.28, 2.0, 1e-3
Identity = tuple[int, int]


@dataclass(frozen=True)
class Samples:
    """Samples of one step: B sequences of L tokens, grouped by prompt.

    tokens, positions: [B, L] int64. attended, sampled, stale_kv: [B, L] bool. logprobs: [B, L]
    float32, as sampled. identity: [B, L, 2] int64, epoch and version of a token's weights. Tokens
    that were not sampled have no logprob (0) and no weights (-1). rewards: [B] float32.
    """

    tokens: Tensor
    positions: Tensor
    attended: Tensor
    sampled: Tensor
    logprobs: Tensor
    identity: Tensor
    stale_kv: Tensor
    rewards: Tensor

    def rows(self, chosen: Tensor) -> Samples:
        """Return these rows."""
        return Samples(*(getattr(self, field.name)[chosen] for field in fields(self)))


@dataclass(frozen=True)
class Row:
    """One row of the table; `turns`: how many turns the policy sampled, per sequence."""

    step: int
    reward: float
    turns: float
    versions: str
    stale_tokens: int
    unchecked_tokens: int
    logprob_difference: float
    raw_difference: float
    importance: float
    transport: str
    publish_seconds: float
    seconds: float


class Policy:
    """The model that learns, and the last versions of its weights, to check samples against.

    Args:
        model: folder of the checkpoint.
        allowed: ids that may be sampled.
    """

    learning_rate = 2e-3

    def __init__(self, model: Path, allowed: Sequence[int]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.banned = torch.ones(self.model.config.vocab_size, dtype=torch.bool)
        self.banned[list(allowed)] = False
        self.prepare()
        learning = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.Adam(learning, lr=self.learning_rate)
        self.versions: dict[Identity, dict[str, Tensor]] = {}
        self.remember((0, 0))

    def prepare(self) -> None:
        """Choose what learns: here, all of the model."""

    def state(self) -> dict[str, Tensor]:
        """Return what learns, by name."""
        state: dict[str, Tensor] = self.model.state_dict()
        return state

    def published(self) -> dict[str, Any]:
        """Return what an update brings, as arguments of `publish_weights`."""
        return {"tensors": self.model}

    def remember(self, identity: Identity) -> None:
        """Keep the current weights as this version, and drop the oldest versions."""
        state = self.state()
        self.versions[identity] = {name: value.clone() for name, value in state.items()}
        while len(self.versions) > KEPT_VERSIONS:
            self.versions.pop(min(self.versions))

    def logprobs(self, samples: Samples, *, raw: bool = False) -> Tensor:
        """Return [B, L]: sampled tokens' logprobs under the sampling distribution, 0 elsewhere.

        `raw`: under the model's own distribution, without temperature and with all tokens.
        """
        logits = self.model(
            input_ids=samples.tokens,
            attention_mask=samples.attended.long(),
            position_ids=samples.positions,
        ).logits[:, :-1]
        if not raw:
            logits = (logits / TEMPERATURE).masked_fill(self.banned, -torch.inf)
        every = torch.nn.functional.pad(logits.log_softmax(-1), (0, 0, 1, 0))
        chosen = every.gather(-1, samples.tokens.unsqueeze(-1)).squeeze(-1)
        return chosen.masked_fill(~samples.sampled, 0.0)

    @torch.no_grad()
    def as_sampled(self, samples: Samples, *, raw: bool = False) -> Tensor:
        """Return [B, L]: each token's logprob under the weights that sampled it; NaN if gone."""
        now = {name: value.clone() for name, value in self.state().items()}
        found = torch.where(samples.sampled, torch.nan, 0.0)
        for identity, state in self.versions.items():
            made = (samples.identity == torch.tensor(identity)).all(-1) & samples.sampled
            if made.any():
                self.model.load_state_dict(state, strict=False)
                found[made] = self.logprobs(samples, raw=raw)[made]
        self.model.load_state_dict(now, strict=False)
        return found

    def learn(self, samples: Samples) -> float:
        """Take two minibatch steps; return the mean importance weight."""
        with torch.no_grad():
            old = self.logprobs(samples)
        weights = (old - samples.logprobs).exp().clamp(max=TRUNCATE)
        gains = advantages(samples.rewards)
        for chosen in torch.randperm(len(gains)).chunk(2):
            part, gain = samples.rows(chosen), gains[chosen, None]
            ratio = (self.logprobs(part) - old[chosen]).exp()
            clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            objective = weights[chosen] * torch.min(ratio * gain, clipped * gain)
            self.step(-objective[part.sampled].mean())
        return float(weights[samples.sampled].mean())

    def step(self, loss: Tensor) -> None:
        """Take one optimizer step."""
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def advantages(rewards: Tensor) -> Tensor:
    """Return [B]: rewards, centered and scaled within each group."""
    groups = rewards.view(-1, GROUP)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def difference(ours: Tensor, samples: Samples) -> float:
    """Return the largest difference from the rollout's logprobs where the KV was not stale."""
    fresh = samples.sampled & ~samples.stale_kv & ~ours.isnan()
    return float((ours - samples.logprobs)[fresh].abs().max()) if fresh.any() else 0.0


def train(publisher: Publisher, draw: Callable[[int], Samples], steps: int, seed: int) -> list[Row]:
    """Run all steps and return the table.

    Args:
        publisher: publishes the policy that learns.
        draw: samples one batch from the pool, given its seed; runs in a thread of its own.
        steps: number of steps.
        seed: seed of the first batch.

    Raises:
        SystemExit: The logprobs don't match the weights that the rollout names.
    """
    policy, rows = publisher.policy, list[Row]()
    with ThreadPoolExecutor(1) as background:
        following = background.submit(draw, seed)
        for step in range(1, steps + 1):
            began = time.monotonic()
            samples = following.result(DEADLINE)
            importance = policy.learn(samples)
            if step < steps:
                # Not while it learns, as a trainer would: these small models would be done before the weights come.
                following = background.submit(draw, seed + step)
            publisher.publish()
            ours = policy.as_sampled(samples)
            matching = difference(ours, samples)
            raw = difference(policy.as_sampled(samples, raw=True), samples)
            versions = sorted(set(map(tuple, samples.identity[samples.sampled].tolist())))
            starts = samples.sampled[:, 1:] & ~samples.sampled[:, :-1]
            row = Row(
                step=step,
                reward=round(float(samples.rewards.mean()), 4),
                turns=round(float(starts.sum()) / len(starts), 3),
                versions=" ".join(f"{epoch}.{version}" for epoch, version in versions),
                stale_tokens=int(samples.stale_kv.sum()),
                unchecked_tokens=int(ours.isnan().sum()),
                logprob_difference=matching,
                raw_difference=raw,
                importance=round(importance, 4),
                transport=publisher.way,
                publish_seconds=round(publisher.seconds, 3),
                seconds=round(time.monotonic() - began, 2),
            )
            rows.append(row)
            _tell(row)
            if matching > TOLERANCE:
                raise SystemExit(f"step {step}: logprobs differ by {matching:.2g} from the rollout")
            if raw < TOLERANCE:
                raise SystemExit("raw logprobs agree as well: the logprob check proves nothing")
    return rows


def _tell(row: Row) -> None:
    print(
        f"step {row.step:3}  reward {row.reward:.3f}  weights {row.versions:<11} "
        f"stale {row.stale_tokens:4}  |dlogp| {row.logprob_difference:.1e} "
        f"(raw {row.raw_difference:.2f})  importance {row.importance:.3f}  "
        f"published in {row.publish_seconds:.2f} s ({row.transport})  {row.seconds:.1f} s",
        flush=True,
    )


def write(rows: list[Row], folder: Path, title: str, chance: float) -> None:
    """Write `table.csv` and the learning curve, `reward.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "table.csv").open("w", newline="") as file:
        written = csv.DictWriter(file, [field.name for field in fields(Row)])
        written.writeheader()
        written.writerows(asdict(row) for row in rows)
    print(
        f"reward {rows[0].reward:.3f} -> {rows[-1].reward:.3f} in {len(rows)} steps; see {folder}"
    )
    axes = (figure := Figure(figsize=(6, 3.5), layout="constrained")).subplots()
    axes.plot([row.step for row in rows], [row.reward for row in rows], marker=".")
    axes.axhline(chance, linestyle=":", color="grey", label="chance")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.05), title=title)
    axes.legend(loc="lower right")
    figure.savefig(folder / "reward.png", dpi=120)


def arguments(text: str, steps: int) -> argparse.ArgumentParser:
    """Return the command line that all tasks share; `text` describes the task."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, formatter_class=raw)
    parser.add_argument("--pool", required=True, help="name of the RolloutReplica")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--model", type=Path, required=True, help="the pool's checkpoint")
    parser.add_argument("--weights", type=Path, required=True, help="folder to write versions to")
    parser.add_argument("--mount", type=Path, required=True, help="same folder, as workers see it")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the plot")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=1)
    return parser
