"""Flags of SGLang that would break a promise of the worker's, and what to use instead.

docs/engines.md shows them; a test holds both against the pinned version's parser.
"""

from __future__ import annotations

from collections.abc import Iterable


def _each(why: str, *flags: str) -> Iterable[tuple[str, str]]:
    return ((flag, why) for flag in flags)


REFUSED: dict[str, str] = dict(
    (
        *_each("set by --model", "--model-path", "--model"),
        ("--device", "set by --device"),
        ("--dtype", "set by --dtype"),
        ("--context-length", "set by --max-length"),
        ("--served-model-name", "set by --served-name"),
        ("--config", "a file could set what the worker sets: give its flags one by one"),
        ("--skip-tokenizer-init", "always set: the worker itself speaks token ids"),
        *_each("the tokenizer is the model's own", "--tokenizer-path", "--tokenizer-mode"),
        ("--tokenizer-worker-num", "the worker talks to one"),
        *_each("the worker generates, token by token", "--is-embedding", "--dllm-algorithm",
               "--encoder-only"),
        # Sampling: its distribution is the request's, and its logprobs are of that distribution.
        ("--sampling-backend", "the worker brings its own sampler"),
        *_each("send sampling parameters with each request", "--sampling-defaults",
               "--preferred-sampling-params"),
        ("--speculative-algorithm", "drafts would leave the logprobs of the sampler out"),
        *_each("tokens would be drawn from what no request asks for", "--enable-watermark",
               "--watermark-config"),
        ("--allow-auto-truncate", "a prompt is taken whole or refused"),
        # Weights: a commit reaches all of them, and a version is what its hash says.
        ("--load-format", "the worker serves the checkpoint's own bytes"),
        ("--custom-weight-loader", "the worker brings its own"),
        ("--weight-version", "set by commits"),
        ("--delete-ckpt-after-loading", "the checkpoint is read again after a restart"),
        ("--checkpoint-engine-wait-weights-before-ready", "weights come through POST /v1/weights/stage"),
        *_each("a version has the checkpoint's layout: quantise the checkpoint", "--quantization",
               "--modelopt-quant", "--quantize-and-serve", "--rl-quant-profile"),
        *_each("an update would not reach weights that are kept elsewhere", "--cpu-offload-gb",
               "--offload-group-size", "--offload-mode", "--kt-weight-path", "--kt-method",
               "--enable-paged-experts", "--ple-offload-embedding",
               "--no-ple-offload-embedding",
               "--enable-elastic-expert-backup", "--weight-cache-mode"),
        *_each("no request names an adapter: merge it into the weights", "--enable-lora",
               "--lora-paths", "--uno-lora-path"),
        # Spans: KV of other weights is never passed off as that of the new ones.
        *_each("KV kept elsewhere outlives the weights that made it", "--hicache-storage-backend",
               "--enable-lmcache", "--enable-flexkv", "--enable-unified-cache-external-linker",
               "--disaggregation-mode"),
        # Sleep.
        ("--enable-weights-cpu-backup", "sleep at level 1 keeps its copy in sleep.spill"),
        # The queue and streams.
        ("--max-queued-requests", "the worker queues: set worker.maxQueue"),
        ("--stream-interval", "the worker sets it for each request"),
        # Ports and processes.
        *_each("the engine listens on no port", "--host", "--port", "--grpc-mode",
               "--smg-grpc-mode", "--grpc-port", "--sidecar", "--api-key", "--admin-api-key",
               "--ssl-keyfile", "--ssl-certfile", "--kv-events-config", "--load-publish-endpoint",
               "--remote-instance-weight-loader-start-seed-via-transfer-engine"),
        ("--use-ray", "the worker watches over SGLang's own processes"),
        *_each("SGLang updates no weights of data-parallel replicas: use more replicas",
               "--dp-size", "--data-parallel-size"),
        *_each("each attention group would take the worker's commands by itself: spread experts with "
               "--ep-size instead", "--enable-dp-attention", "--attn-dp-size",
               "--attention-data-parallel-size"),
        *_each("SGLang's pipelines can't be paused: use tensor parallelism", "--pp-size",
               "--pipeline-parallel-size"),
        ("--nnodes", "set by parallelism.nodes (--nodes of the worker)"),
        ("--node-rank", "set by --rank of the worker"),
        *_each("set by --leader-address and --gang-port of the worker", "--dist-init-addr",
               "--nccl-init-addr"),
    )
)  # fmt: skip
"""By each of the flag's names."""
