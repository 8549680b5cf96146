"""A trainer with PEFT itself: `peft_job.py MODEL URL CONTROL_URL FOLDER` publishes, generates, and prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from rollout_client import RolloutPool

PROMPT = [5, 6, 7, 8, 9, 100, 200, 300]
SAMPLING = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def adapted_model(folder: Path) -> Any:
    """A model with two adapters of random numbers, one of them rank-stabilised."""
    import peft  # type: ignore[import-not-found,unused-ignore]

    torch.manual_seed(0)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    every = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False
    )
    few = peft.LoraConfig(
        r=4,
        lora_alpha=4,
        target_modules=["q_proj", "v_proj"],
        use_rslora=True,
        init_lora_weights=False,
    )
    model = peft.get_peft_model(base, every)
    model.add_adapter("second", few)
    return model


@torch.no_grad()
def compared(pool: RolloutPool, model: Any, name: str) -> dict[str, Any]:
    """What the pool makes with an adapter, against PEFT's own pass."""
    result = pool.generate(PROMPT, adapter=name, sampling=SAMPLING, logprobs="raw")
    model.set_adapter(name)
    ids = torch.tensor([[*PROMPT, *result.token_ids]])
    rows = model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].float().log_softmax(-1)
    own = rows.gather(-1, ids[0, len(PROMPT) :, None]).squeeze(-1)
    off = (own - torch.tensor(result.logprobs)).abs().max()
    return {"greedy": rows.argmax(-1).tolist() == list(result.token_ids), "off": float(off)}


def main(folder: str, url: str, control_url: str, home: str) -> None:
    """Publish by memory, then as `save_pretrained` writes it."""
    model = adapted_model(Path(folder))
    found: dict[str, Any] = {}
    with RolloutPool.from_urls([url], control_urls=[control_url]) as pool:
        pool.acquire()
        pool.publish_weights(1, adapters={"default": model, "second": model})
        found["pushed"] = {name: compared(pool, model, name) for name in ("default", "second")}
        model.save_pretrained(home)
        pool.publish_weights(2, path=home)
        found["saved"] = {name: compared(pool, model, name) for name in ("default", "second")}
        pool.publish_weights(3, path=None)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
