"""A program for vLLM's interpreter: load two versions by vLLM's own loaders, then by recorded copies, and compare.

Arguments: the folder of a model, that of another version of it, and the rounds. Prints one JSON object: `tensors`
(how many), `own`, `copies` and `ring` (seconds of each load; `ring`: by copies through a ring in main memory),
`recording` (seconds of the load that was recorded), `layers` and `in_place` (of the recorded load; 0: it can't be),
`outputs`: by version and way the tokens and logprobs of a greedy output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

if TYPE_CHECKING:
    from torch import Tensor, nn

ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
EXTENSION = "rollout_worker.engines.vllm.ranks.extension.Extension"
ALIGN = 256
RING_BYTES = 1 << 20
"""Of each buffer: a tiny model's layers must not all fit."""


def stage_version(folder: Path, file: Path) -> str:
    """Write a version's bytes as they are staged; return the ticket that a rank loads them by."""
    from rollout_worker.engines.shared_memory.tensor_views import TORCH_DTYPES

    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    rows: list[list[Any]] = []
    with open(file, "wb") as out:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as source:
                for name in sorted(source.keys()):
                    tensor = source.get_tensor(name).contiguous()
                    out.seek(-(-out.tell() // ALIGN) * ALIGN)
                    rows.append([name, names[tensor.dtype], list(tensor.shape), out.tell()])
                    out.write(tensor.view(-1).view(TORCH_DTYPES["U8"]).numpy().tobytes())
    return json.dumps({"path": str(file), "size": file.stat().st_size, "tensors": rows})


def make_rank(target: nn.Module, draft: nn.Module | None = None) -> Any:
    """Return our extension of a vLLM rank on the CPU that serves a target, and a draft of it, by vLLM's own reload."""
    import torch
    from vllm.model_executor.model_loader.reload import inplace

    from rollout_worker.engines.vllm.ranks import extension

    small = SimpleNamespace(quantization=None, dtype=torch.float32)
    config: Any = SimpleNamespace(
        speculative_config=draft and SimpleNamespace(draft_model_config=small),
        model_config=small,
        load_config=None,
        lora_config=None,
    )

    class Runner:
        def get_model(self) -> nn.Module:
            return target

        def reload_weights(self, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
            inplace.reload_weights(config, target, weights_iterator, None, True)

    class Worker(extension.Extension):
        device, model_runner, vllm_config = torch.device("cpu"), Runner(), config

        def get_draft_model(self) -> nn.Module | None:
            return draft

    return Worker()


def forget_load(worker: Any, rows: list[list[Any]] | None) -> None:
    """Let the next load of these tensors be vLLM's own; of None: let it be recorded."""
    inner = getattr(worker, "worker", worker)  # vLLM gives its wrapper of a rank
    inner._rollout_plan, inner._rollout_unrecordable = None, rows


def describe_plan(worker: Any) -> tuple[int, int]:
    """Return how many layers were recorded, and how many of them are copied in place."""
    plan = worker._rollout_plan
    return (0, 0) if plan is None else (len(plan.layers), sum(p.in_place for p in plan.layers))


def copy_through_ring(_: Any) -> None:
    """Let copies go through a ring, as to a GPU; here of memory that is not locked."""
    import torch

    from rollout_worker.engines.shared_memory import copy_plan
    from rollout_worker.engines.shared_memory.copy_ring import CopyRing

    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    buffers = [torch.empty(RING_BYTES, dtype=torch.uint8) for _ in range(2)]
    ring = CopyRing(buffers, [event, event], torch._foreach_copy_)
    vars(copy_plan)["open_ring"] = lambda *_: ring


def main(model: str, other: str, rounds: int) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        worker_extension_cls=EXTENSION,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=0
    )
    tickets = {
        name: stage_version(Path(folder), Path(f"{name}.bytes"))
        for name, folder in (("first", model), ("second", other))
    }
    outputs: dict[str, Any] = {}

    def load(name: str, way: str) -> float:
        engine.reset_prefix_cache()
        begin = time.perf_counter()
        engine.collective_rpc("rollout_load", args=(tickets[name],))
        seconds = time.perf_counter() - begin
        prompt = [{"prompt_token_ids": [5, 6, 7, 8]}]
        [made] = engine.generate(prompt, sampling, use_tqdm=False)[0].outputs
        outputs[f"{name} {way}"] = [list(made.token_ids), made.cumulative_logprob]
        return seconds

    rows = [row[:3] for row in json.loads(tickets["first"])["tensors"]]
    engine.collective_rpc(forget_load, args=(rows,))
    own = [load(name, "own") for _ in range(rounds) for name in tickets]
    engine.collective_rpc(forget_load, args=(None,))
    recording = load("first", "recorded")
    copies = [load(name, "copies") for _ in range(rounds) for name in ("second", "first")]
    layers, in_place = engine.collective_rpc(describe_plan)[0]
    engine.collective_rpc(copy_through_ring)
    ring = [load(name, "ring") for _ in range(rounds) for name in ("second", "first")]
    times = {"own": own, "recording": recording, "copies": copies, "ring": ring}
    facts = {"tensors": len(rows), **times}
    sys.stdout.write(
        json.dumps({**facts, "layers": layers, "in_place": in_place, "outputs": outputs}) + "\n"
    )


if __name__ == "__main__":
    os.environ.update(ENVIRON)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
