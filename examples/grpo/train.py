"""GRPO in plain torch over a pool of rollout workers: teach a tiny model to count.

    python train.py --pool counting --namespace demo --model MODEL --weights FOLDER

The prompt is a digit, a sample is twelve tokens, and the reward is the share of them that count on
from the token before (8, 9, 0, 1, …). Sampling may draw digits only, so an untrained model earns
0.1. One step:

1. the pool draws the *next* batch while this one is learned from: data is one step old, and an
   update arrives while requests run (`inFlight.policy: Keep`);
2. rewards, and advantages within each group of samples of one prompt (GRPO, arXiv:2402.03300);
3. two minibatches of the clipped policy gradient (PPO, arXiv:1707.06347); each token is weighted by
   min(pi_trainer / pi_rollout, 2), because the policy that is learned from is not quite the one
   that was sampled (truncated importance sampling);
4. safetensors onto the shared volume, `publish_weights`, next step.

Every token says which weights made it. With those the trainer computes its logprob again: both must
agree to 1e-3 unless KV of older weights was reused. *Raw* logprobs must not, or nothing is proven.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from matplotlib.figure import Figure
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollout_client import GenerateResult, RolloutPool
from rollout_worker.weights import write_manifest

TEN, PROMPTS, GROUP, LENGTH = 10, 32, 8, 12
TEMPERATURE = 0.8
CLIP_LOW, CLIP_HIGH, TRUNCATE = 0.2, 0.28, 2.0
LOGPROB_TOLERANCE, DEADLINE = 1e-3, 300.0

Identity = tuple[int, int]


@dataclass(frozen=True)
class Batch:
    """Samples of one step; B sequences of one prompt token and `LENGTH` sampled ones.

    tokens: [B, 1 + LENGTH] int64, as digits. logprobs: [B, LENGTH] float32, as drawn. identity: per
    token. stale_kv: [B, LENGTH] bool.
    """

    tokens: Tensor
    logprobs: Tensor
    identity: list[list[Identity]]
    stale_kv: Tensor


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    step: int
    reward: float
    versions: str
    stale_tokens: int
    logprob_difference: float
    raw_difference: float
    importance: float
    seconds: float


class Policy:
    """The model that learns, and the weights of the last versions, to check samples against."""

    def __init__(self, model: Path, digits: Sequence[int]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.digits = torch.tensor(digits)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        self.versions: dict[Identity, dict[str, Tensor]] = {}

    def remember(self, identity: Identity) -> None:
        """Keep these weights; samples may come from the last three versions."""
        state = self.model.state_dict()
        self.versions[identity] = {name: value.clone() for name, value in state.items()}
        while len(self.versions) > 3:
            self.versions.pop(min(self.versions))

    def logits(self, tokens: Tensor) -> Tensor:
        """Return [B, LENGTH, V]: what predicts each sampled token."""
        out: Tensor = self.model(self.digits[tokens]).logits
        return out[:, :-1].float()

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Return [B, LENGTH] of the distribution that is sampled: digits only, with temperature."""
        heated = self.logits(tokens)[..., self.digits] / TEMPERATURE
        return _chosen(heated.log_softmax(-1), tokens[:, 1:])

    @torch.no_grad()
    def as_sampled(self, batch: Batch, *, raw: bool = False) -> Tensor:
        """Return [B, LENGTH]: each token's logprob under the weights that made it; NaN if gone."""
        now = {name: value.clone() for name, value in self.model.state_dict().items()}
        found = torch.full_like(batch.logprobs, torch.nan)
        for identity, state in self.versions.items():
            made = torch.tensor([[each == identity for each in row] for row in batch.identity])
            if made.any():
                self.model.load_state_dict(state)
                if raw:
                    every = self.logits(batch.tokens).log_softmax(-1)
                    values = _chosen(every, self.digits[batch.tokens[:, 1:]])
                else:
                    values = self.logprobs(batch.tokens)
                found[made] = values[made]
        self.model.load_state_dict(now)
        return found

    def learn(self, batch: Batch, advantages: Tensor) -> float:
        """Take two minibatch steps; return the mean importance weight."""
        with torch.no_grad():
            old = self.logprobs(batch.tokens)
        weights = (old - batch.logprobs).exp().clamp(max=TRUNCATE)
        for chosen in torch.randperm(len(batch.tokens)).chunk(2):
            ratio = (self.logprobs(batch.tokens[chosen]) - old[chosen]).exp()
            gain = advantages[chosen, None]
            clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            loss = -(weights[chosen] * torch.min(ratio * gain, clipped * gain)).mean()
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return float(weights.mean())

    def save(self, folder: Path) -> None:
        """Write a version where the workers read it; the manifest comes last."""
        folder.mkdir(parents=True)
        state = {name: value.contiguous() for name, value in self.model.state_dict().items()}
        if self.model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)
        write_manifest(folder)


def _chosen(logprobs: Tensor, tokens: Tensor) -> Tensor:
    return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def rewards(tokens: Tensor) -> Tensor:
    """Return [B]: the share of tokens that count on from the one before them."""
    return ((tokens[:, 1:] - tokens[:, :-1]) % TEN == 1).float().mean(1)


def advantages_of(earned: Tensor) -> Tensor:
    """Return [B]: rewards centred and scaled within each group."""
    groups = earned.view(-1, GROUP)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def sample(pool: RolloutPool, digits: Sequence[int], seed: int) -> Batch:
    """Draw `PROMPTS` groups of `GROUP` samples from the pool."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, TEN, (PROMPTS,), generator=generator).repeat_interleave(GROUP)
    sampling = {
        "max_tokens": LENGTH,
        "temperature": TEMPERATURE,
        "allowed_token_ids": list(digits),
        "ignore_eos": True,
    }
    results: list[GenerateResult] = pool.generate_many(
        [[digits[start]] for start in starts.tolist()], sampling=sampling, logprobs="sampling"
    )
    digit_of = {token: digit for digit, token in enumerate(digits)}
    rows = [[digit_of[token] for token in result.token_ids] for result in results]
    spans = [list(_by_token(result)) for result in results]
    return Batch(
        tokens=torch.cat([starts[:, None], torch.tensor(rows)], dim=1),
        logprobs=torch.tensor([result.logprobs for result in results]),
        identity=[[identity for identity, _ in row] for row in spans],
        stale_kv=torch.tensor([[stale for _, stale in row] for row in spans]),
    )


def _by_token(result: GenerateResult) -> Iterator[tuple[Identity, bool]]:
    for span in result.output.weights:
        yield from [((span.epoch, span.version), span.stale_kv)] * (span.end - span.start)


def difference(ours: Tensor, batch: Batch) -> float:
    """Return the largest difference to the rollout's logprobs where the KV was not stale."""
    fresh = ~batch.stale_kv & ~ours.isnan()
    return float((ours - batch.logprobs)[fresh].abs().max()) if fresh.any() else 0.0


def train(args: argparse.Namespace, pool: RolloutPool) -> list[Row]:
    """Run all steps; returns the table."""
    torch.manual_seed(args.seed)
    policy = Policy(args.model, args.digits)
    policy.remember((0, 0))
    epoch = pool.acquire()
    out: Path = args.weights / f"epoch-{epoch}"
    shutil.rmtree(out, ignore_errors=True)
    rows: list[Row] = []
    with ThreadPoolExecutor(1) as background:
        following: Future[Batch] = background.submit(sample, pool, args.digits, args.seed)
        for step in range(1, args.steps + 1):
            began = time.monotonic()
            batch = following.result(DEADLINE)
            following = background.submit(sample, pool, args.digits, args.seed + step)
            earned = rewards(batch.tokens)
            matching = difference(policy.as_sampled(batch), batch)
            raw = difference(policy.as_sampled(batch, raw=True), batch)
            importance = policy.learn(batch, advantages_of(earned))
            policy.save(out / str(step))
            pool.publish_weights(step, str(args.mount / f"epoch-{epoch}" / str(step)))
            policy.remember((epoch, step))
            _prune(out, step)
            versions = sorted({each for row in batch.identity for each in row})
            row = Row(
                step=step,
                reward=round(float(earned.mean()), 4),
                versions=" ".join(f"{e}.{v}" for e, v in versions),
                stale_tokens=int(batch.stale_kv.sum()),
                logprob_difference=matching,
                raw_difference=raw,
                importance=round(importance, 4),
                seconds=round(time.monotonic() - began, 2),
            )
            rows.append(row)
            _tell(row)
            if matching > LOGPROB_TOLERANCE:
                raise SystemExit(f"step {step}: logprobs differ by {matching:.2g} from the rollout")
            if raw < LOGPROB_TOLERANCE:
                raise SystemExit("raw logprobs agree, too: the check of logprobs checks nothing")
        following.result(DEADLINE)
    return rows


def _prune(out: Path, step: int) -> None:
    """A version's bytes stay until a later one is committed, and a while for those that restart."""
    for folder in out.iterdir():
        if int(folder.name) < step - 2:
            shutil.rmtree(folder)


def _tell(row: Row) -> None:
    print(
        f"step {row.step:3}  reward {row.reward:.3f}  weights {row.versions:<11} "
        f"stale {row.stale_tokens:4}  |dlogp| {row.logprob_difference:.1e} "
        f"(raw {row.raw_difference:.2f})  importance {row.importance:.3f}  {row.seconds:.1f} s",
        flush=True,
    )


def write(rows: list[Row], folder: Path) -> None:
    """Write `table.csv` and the learning curve `reward.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "table.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Row)])
        table.writeheader()
        table.writerows(asdict(row) for row in rows)
    last = sum(row.reward for row in rows[-3:]) / len(rows[-3:])
    print(f"reward {rows[0].reward:.3f} -> {last:.3f} in {len(rows)} steps; see {folder}")
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([row.step for row in rows], [row.reward for row in rows], marker=".")
    axes.axhline(1 / TEN, linestyle=":", color="grey", label="chance")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.05), title="GRPO: counting on")
    axes.legend(loc="lower right")
    figure.savefig(folder / "reward.png", dpi=120)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pool", required=True, help="name of the RolloutReplica")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--model", type=Path, required=True, help="the pool's checkpoint")
    parser.add_argument("--weights", type=Path, required=True, help="where versions are written")
    parser.add_argument("--mount", type=Path, required=True, help="that folder, as workers see it")
    parser.add_argument("--out", type=Path, required=True, help="for the table and the plot")
    parser.add_argument("--digits", type=int, nargs=TEN, default=range(20, 30), metavar="ID")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    disable_progress_bar()
    with RolloutPool.from_cluster(args.pool, args.namespace) as pool:
        pool.wait_serving(seconds=DEADLINE)
        write(train(args, pool), args.out)


if __name__ == "__main__":
    main()
