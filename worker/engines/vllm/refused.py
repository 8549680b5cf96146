"""Flags of vLLM that would break a promise of the worker's, and what to use instead.

docs/engines.md shows them; a test holds both against the pinned version's parser.
"""

from __future__ import annotations

from collections.abc import Iterable


def _each(why: str, *flags: str) -> Iterable[tuple[str, str]]:
    return ((flag, why) for flag in flags)


REFUSED: dict[str, str] = dict(
    (
        ("--model", "set model.source (--model of the worker)"),
        ("--dtype", "set model.dtype (--dtype of the worker)"),
        ("--max-model-len", "set model.maxLength (--max-length of the worker)"),
        ("--served-model-name", "set model.servedName (--served-name of the worker)"),
        ("--logprobs-mode", "set engine.logprobs (--logprobs of the worker)"),
        ("--config", "a file could set what the worker sets: give its flags one by one"),
        *_each("the tokenizer is the model's own", "--tokenizer", "--tokenizer-mode"),
        ("--skip-tokenizer-init", "it is always set: the engine takes and gives token ids"),
        *_each("the worker generates, token by token", "--runner", "--convert", "--diffusion-config"),
        # Sampling: its distribution is the request's, and its logprobs are of that distribution.
        ("--generation-config", "only EOS ids are taken from generation_config.json"),
        ("--override-generation-config", "send sampling parameters with each request"),
        *_each("tokens would be drawn from what no request asks for", "--logits-processors",
               "--watermark-config"),
        # Weights: a commit reaches all of them, and a version is what its hash says.
        ("--load-format", "the worker serves the checkpoint's own bytes"),
        ("--worker-extension-cls", "weights come through it"),
        ("--worker-cls", "weights, sleep and deaths are those of vLLM's own workers"),
        ("--weight-transfer-config", "weights come through POST /v1/weights/stage"),
        *_each("an update would not reach weights that are kept elsewhere", "--offload-backend",
               "--cpu-offload-gb", "--cpu-offload-params", "--offload-group-size",
               "--offload-num-in-group", "--offload-prefetch-step", "--offload-params"),
        *_each("an update puts experts where they were at the start", "--enable-eplb",
               "--eplb-config"),
        ("--enable-lora", "no request names an adapter: merge it into the weights"),
        # Spans: KV of other weights is never passed off as that of the new ones.
        *_each("KV kept elsewhere outlives the weights that made it", "--kv-transfer-config",
               "--kv-offloading-size", "--kv-offloading-backend", "--ec-transfer-config"),
        # Sleep.
        *_each("it is set where the device can", "--enable-sleep-mode", "--enable-cumem-allocator"),
        ("--sleep-preserve-parameter-names", "sleep at level 2 keeps nothing, level 1 everything"),
        # The queue, pauses, streams and the watch for hung steps.
        *_each("the worker queues: set worker.maxQueue (--max-queue of the worker)",
               "--max-num-queued-reqs", "--max-num-queued-tokens"),
        ("--scheduler-cls", "pauses, commits and priorities are those of vLLM's own scheduler"),
        ("--stream-interval", "the worker sets it for each request"),
        ("--disable-log-stats", "hung steps are told by them"),
        # Ports and processes.
        *_each("the engine opens no port of its own", "--kv-events-config",
               "--data-parallel-multi-port-external-lb"),
        ("--nnodes", "set parallelism.nodes (--nodes of the worker)"),
        ("--node-rank", "set by parallelism.nodes (--rank of the worker)"),
        ("--master-addr", "set by parallelism.nodes (--leader-address of the worker)"),
        ("--master-port", "set by parallelism.nodes (--gang-port of the worker)"),
        *_each("one worker heads all ranks: set parallelism", "--data-parallel-hybrid-lb",
               "--data-parallel-external-lb", "--data-parallel-rank", "--data-parallel-start-rank",
               "--enable-elastic-ep", "--elastic-ep-max-dp-size", "--enable-fault-tolerance"),
    )
)  # fmt: skip
"""By the flag's first long name; its other names, `--no-` forms and `--flag.key` are meant, too."""
