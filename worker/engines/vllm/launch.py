"""From a model folder to a running vLLM: environment, configuration, what is refused, processes.

Everything here blocks, for seconds, and runs in a thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import multiprocessing.resource_tracker
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout_common.garbage_collection import without_garbage_collection
from rollout_common.turn.sharing import SOCKET
from rollout_common.wire import MAX_TOP_LOGPROBS, Progress
from rollout_worker.engine import EngineError, GangMembership, WeightsLayout
from rollout_worker.engines.grammars.grammar_checker import supports_grammars
from rollout_worker.engines.model_folder import (
    checkpoint_dtype,
    load_tokenizer,
    read_config,
    read_eos_ids,
    resolve_batch_tokens,
    start_while_hashing,
)
from rollout_worker.engines.network import choose_interface, own_address, resolve_address
from rollout_worker.engines.options import EngineOptions
from rollout_worker.engines.picture_model import (
    PICTURE_FAMILIES,
    PictureModel,
    read_picture_model,
)
from rollout_worker.engines.shared_memory.sinks import SLOTS_VARIABLE
from rollout_worker.engines.vllm.ranks.draw_masks import MASK_SCHEDULER, can_record_masks
from rollout_worker.observe.processes import ProcessHandle, find_descendants
from rollout_worker.sources.checkpoint_files import open_source

from .intake import VllmModel, leave_ends_to_requests, skip_grammar_validation
from .settings import VllmSettings
from .shutdown import ReportProgress, find_shared_memory, use_process_folder
from .under_ray import prepare_ray
from .vllm_drafts import WITH_WEIGHTS, check_drafts, find_layout
from .vllm_streams import keep_prompt_tensors

logger = logging.getLogger(__name__)

EXTENSION_PATH = "rollout_worker.engines.vllm.ranks.extension.Extension"
LOGPROBS_MODES = {"sampling": "processed_logprobs", "raw": "raw_logprobs"}
PROCESS_TITLE = "VLLM::"
"""Where the titles of vLLM's processes begin."""
SLACK_TOKENS = 1
"""vLLM makes a token of every request, even of one that only scores a prompt of the maximum length."""
LARGE_BLOCK_TOKENS = 256
"""As large as a block of KV is on a GPU where vLLM does not choose its size by a hybrid model's states."""

PICTURE_ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": False,  # vLLM's processor, of which nothing is asked, wants one
    "mm_device_do_normalize": False,  # pictures come normalised
    "mm_processor_cache_gb": 0.0,  # each request brings its pictures
}

SHARED_DEVICE_FLAGS = ("sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend")
"""Flags by which a sleep gives back more than weights and KV. They cost all-reduces in graphs a copy, so they
are set only where others share the devices."""


@dataclass(slots=True)
class StepCounter:
    """How many steps vLLM has reported, and the monotonic time of the last one, also of each data-parallel rank."""

    count: int = 0
    last: float = field(default_factory=time.monotonic)
    last_of: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class LaunchedVllm:
    """A running vLLM and what it serves.

    `processes`: all that it started, `segments`: the shared memory that they map. `vital`: its core
    and workers, none of which may end.
    """

    llm: Any
    config: Any
    steps: StepCounter
    model: VllmModel
    layout: WeightsLayout
    root_hash: str
    cpu: bool
    processes: set[ProcessHandle]
    segments: set[str]
    vital: set[ProcessHandle]


def prepare_environment() -> None:
    """Set what vLLM reads of the environment, unless it is set; how it starts processes in any case."""
    # A forked process has our listening sockets, memory of staged weights that is never given back, and the
    # wakeup descriptor of our loop: a SIGTERM to it arrives here. Our threads may hold locks besides.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if "OMP_NUM_THREADS" in os.environ:
        # Else vLLM binds its workers to cores of its own choice, those of other workers included.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _join_gang(
    gang: GangMembership, settings: VllmSettings, cancelled: Callable[[], bool]
) -> dict[str, Any]:
    """Set what the ranks of this node read of the environment; return what this adapter sets besides."""
    leader = resolve_address(gang.leader, cancelled)
    own = own_address(leader)
    os.environ[SLOTS_VARIABLE] = str(gang.slots)
    defaults = {
        "VLLM_HOST_IP": own,
        "GLOO_SOCKET_IFNAME": choose_interface(own),
        # A step over the network hangs where one on a node fails: the worker's own deadline comes first.
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(max(1, round(settings.step_deadline_seconds))),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    return {
        "nnodes": gang.nodes,
        "node_rank": gang.rank,
        "master_addr": leader,
        "master_port": gang.port,
        "distributed_executor_backend": "mp",
    }


def prepare_launch(
    options: EngineOptions,
    settings: VllmSettings,
    report: ReportProgress,
    cancelled: Callable[[], bool],
) -> tuple[Any, WeightsLayout, VllmModel]:
    """Return vLLM's configuration, the checkpoint's layout, and what requests are checked by.

    Raises:
        EngineError: not a model that vLLM can serve here; the text says what to change.
        ReadCancelled: `cancelled` returned True.
    """
    report(Progress(message="reading the model's configuration"))
    kind = read_config(options.model).get("model_type")
    gang = {} if options.gang is None else _join_gang(options.gang, settings, cancelled)
    _import_vllm()  # it reads the environment
    tokenizer = load_tokenizer(options.model)
    pictures = _picture_model(options, settings, kind)
    ours = _engine_arguments(options, settings, cpu=_runs_on_cpu()) | gang
    if _needs_tokenizer(options, tokenizer):
        ours["skip_tokenizer_init"] = False
    if kind in PICTURE_FAMILIES:
        ours |= {"language_model_only": True} if pictures is None else PICTURE_ARGUMENTS
    config = _make_config(options, settings, ours)
    # With grammars of the same library as those that were checked.
    config.structured_outputs_config.backend = "guidance"
    text = config.model_config.hf_text_config
    vocab = int(config.model_config.get_vocab_size())
    model = VllmModel(
        max_length=int(config.model_config.max_model_len) - SLACK_TOKENS,
        vocab_size=vocab,
        eos_token_ids=read_eos_ids(options.model, getattr(text, "eos_token_id", None), vocab),
        tokenizer=tokenizer,
        bounded=bool(config.use_v2_model_runner),
        pictures=pictures,
    )
    return config, find_layout(config, options.model, cancelled), model


def launch_vllm(
    options: EngineOptions,
    settings: VllmSettings,
    report: ReportProgress,
    cancelled: Callable[[], bool],
) -> LaunchedVllm:
    """Start vLLM; raises what `prepare_launch` raises, and leaves no process behind then."""
    config, layout, model = prepare_launch(options, settings, report, cancelled)
    before = find_descendants(os.getpid())
    steps = StepCounter()
    llm, root_hash = start_while_hashing(
        options.model,
        report,
        cancelled,
        lambda: _construct_llm(config, steps),
        lambda it: it.shutdown(),
    )
    # Python's own helper of this process is not vLLM's.
    helper = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)
    processes = {p for p in find_descendants(os.getpid()) - before if p.pid != helper}
    return LaunchedVllm(
        llm=llm,
        config=config,
        steps=steps,
        model=model,
        layout=layout,
        root_hash=root_hash,
        cpu=_runs_on_cpu(),
        processes=processes,
        segments=find_shared_memory(processes),
        vital={p for p in processes if p.command_line().startswith(PROCESS_TITLE)},
    )


def _runs_on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _import_vllm() -> None:
    """Import most of vLLM: five seconds of work, and seven if garbage is collected, of which there is none."""
    with without_garbage_collection():
        import vllm.engine.arg_utils
        import vllm.v1.engine.async_llm  # noqa: F401


def _make_config(options: EngineOptions, settings: VllmSettings, ours: Mapping[str, Any]) -> Any:
    """Return vLLM's configuration; `ours`: what this adapter sets."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    cpu = _runs_on_cpu()
    if options.device not in ("auto", "cpu" if cpu else "cuda"):
        raise EngineError(
            f"device {options.device!r} is asked for, but this vLLM runs on "
            f"{current_platform.device_name}: install the vLLM of the device"
        )
    # Ours go in before vLLM looks at them: offline it would look for its default model.
    args = AsyncEngineArgs.from_cli_args(argparse.Namespace(**{**vars(settings.vllm), **ours}))
    if args.distributed_executor_backend == "ray":
        prepare_ray(current_platform)
    try:
        headless = options.gang is not None and options.gang.rank > 0
        config = args.create_engine_config(UsageContext.OPENAI_API_SERVER, headless=headless)
    except (ValueError, NotImplementedError, OSError) as error:
        raise EngineError(f"vLLM can't serve this model so: {error}") from error
    if cpu:
        # Nothing is worth compiling in eager mode, and it would take a C++ compiler in the image.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        _check_head_size(config)
    check_drafts(config, gang=options.gang is not None)
    if cpu or options.max_batch_tokens is not None:
        _bound_kv_cache(config, options)
    config.model_config.max_model_len += SLACK_TOKENS
    if can_record_masks(config):
        config.scheduler_config.scheduler_cls = MASK_SCHEDULER
    return config


def _engine_arguments(
    options: EngineOptions, settings: VllmSettings, *, cpu: bool
) -> dict[str, Any]:
    """Return what this adapter sets, whatever the flags say."""
    # vLLM's own choice of a dtype would round float32 to bfloat16.
    dtype: str = options.dtype
    if dtype == "auto":
        dtype = checkpoint_dtype(open_source(options.model).entries) or dtype
    ours: dict[str, Any] = {
        "model": str(options.model),
        "tokenizer": str(options.model),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": options.max_length,
        "logprobs_mode": LOGPROBS_MODES[options.logprobs],
        "generation_config": "vllm",
        "worker_extension_cls": EXTENSION_PATH,
        "enable_sleep_mode": not cpu,
        "disable_log_stats": False,
    }
    if "max_logprobs" not in settings.given:
        ours["max_logprobs"] = MAX_TOP_LOGPROBS
    if not cpu and SOCKET in os.environ:
        ours |= {flag: True for flag in SHARED_DEVICE_FLAGS if flag not in settings.given}
    if not cpu and "distributed_executor_backend" not in settings.given:
        # Else a single GPU's model runs inside the core, which nothing ends when the worker dies.
        ours["distributed_executor_backend"] = "mp"
    if cpu:
        # Compiled code holds on to the packed weights that it was traced with.
        ours["enforce_eager"] = True
        if "enable_chunked_prefill" not in settings.given:
            ours["enable_chunked_prefill"] = False  # with it, vLLM's core dies of a seed on a CPU
    return ours


def can_mask_tokens(tokenizer: Any | None, eos: frozenset[int]) -> bool:
    """Whether vLLM's core can compile grammars: it ends a text with the tokenizer's own EOS, which has to end the output."""
    return tokenizer is not None and supports_grammars(tokenizer, eos & {tokenizer.eos_token_id})


def _needs_tokenizer(options: EngineOptions, tokenizer: Any | None) -> bool:
    """Whether vLLM's core has to have the tokenizer, for grammars alone."""
    eos = read_eos_ids(options.model, read_config(options.model).get("eos_token_id"))
    return can_mask_tokens(tokenizer, eos)


def _picture_model(
    options: EngineOptions, settings: VllmSettings, kind: object
) -> PictureModel | None:
    """Return how the model takes pictures; None: it gets text only."""
    if settings.vllm.language_model_only:
        return None
    if kind in PICTURE_FAMILIES and importlib.util.find_spec("torchvision") is None:
        logger.warning("torchvision is not installed, which vLLM needs for pictures: text only")
        return None
    return read_picture_model(options.model, kind)


def most_top_logprobs(config: Any) -> int:
    """Return the largest `top_logprobs` that vLLM takes: `--max-logprobs`, where it is given."""
    most = int(config.model_config.max_logprobs)
    return MAX_TOP_LOGPROBS if most < 0 else min(most, MAX_TOP_LOGPROBS)


def _check_head_size(config: Any) -> None:
    """Refuse a head size with which vLLM would start on a CPU, and die at the first request."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if config.model_config.use_mla:
        return
    size = int(config.model_config.get_head_size())
    able = [int(each) for each in CPUAttentionBackend.get_supported_head_sizes()]
    if size not in able:
        raise EngineError(
            f"vLLM has no attention for head_dim {size} on a CPU, only for "
            f"{', '.join(map(str, able))}: use the hf engine, or a GPU"
        )


def _bound_kv_cache(config: Any, options: EngineOptions) -> None:
    """Bound the KV cache: always on a CPU, where vLLM would take nearly all memory, on a GPU if asked to."""
    model, cache = config.model_config, config.cache_config
    tokens = resolve_batch_tokens(options.max_batch_tokens, model.max_model_len)
    if cache.kv_cache_memory_bytes is not None and options.max_batch_tokens is None:
        return
    token_bytes = _kv_token_bytes(model, config.parallel_config, cache)
    drafts = config.speculative_config
    if drafts is not None and drafts.method in WITH_WEIGHTS:
        token_bytes += _kv_token_bytes(
            drafts.draft_model_config, drafts.draft_parallel_config, cache
        )
    # On a GPU, vLLM chooses larger blocks later where the attention of a model wants them.
    size = cache.block_size if _runs_on_cpu() else max(cache.block_size, LARGE_BLOCK_TOKENS)
    blocks = -(-(tokens + SLACK_TOKENS) // size) + 1  # one is vLLM's own
    cache.kv_cache_memory_bytes = blocks * size * token_bytes


def _kv_token_bytes(model: Any, parallel: Any, cache: Any) -> int:
    """Return the bytes of a token's KV in a rank."""
    heads = model.get_num_kv_heads(parallel) * model.get_head_size()
    each = 1 if str(cache.cache_dtype).startswith("fp8") else model.dtype.itemsize
    return int((1 if model.use_mla else 2) * model.get_num_layers(parallel) * heads * each)


def _construct_llm(config: Any, steps: StepCounter) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    keep_prompt_tensors()
    skip_grammar_validation()
    leave_ends_to_requests()

    class StepLogger(StatLoggerBase):  # type: ignore[misc,unused-ignore]
        """Counts every step."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, *_: Any, engine_idx: int = 0, **__: Any) -> None:
            steps.count += 1
            steps.last = steps.last_of[engine_idx] = time.monotonic()

        def log_engine_initialized(self) -> None:
            pass

        def log(self) -> None:
            pass

    try:
        with use_process_folder():
            return AsyncLLM.from_vllm_config(config, stat_loggers=[StepLogger])
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(f"vLLM did not start: {error}; its own log says why") from error
