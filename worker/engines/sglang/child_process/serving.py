"""The child's main process: SGLang's engine, and the connection to the worker.

It speaks the protocol of `child_connection` over the inherited socket. Nothing else can reach this engine:
it listens on no port. When the socket closes, the process ends, and the schedulers with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import pickle
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers import io_struct as messages
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import torch_memory_saver_adapter as adapter
from sglang.srt.utils.common import set_prometheus_multiproc_dir
from sglang.version import __version__

from rollout_common.garbage_collection import freeze_heap
from rollout_common.turn.sharing import SOCKET
from rollout_worker.engines.sglang.child_connection import MAX_LINE_BYTES, encode_frame
from rollout_worker.engines.sglang.settings import with_graph_tags
from rollout_worker.engines.sglang.sglang_records import pack_prompt
from rollout_worker.engines.sglang.sglang_streams import to_child_tokens

from . import patches
from .child_pictures import ChildPictures

logger = logging.getLogger(__name__)

PICTURE_COMMANDS = ("use_pictures", "keep_picture")
"""Not answered, and done in the order of requests."""

LOADER_PATH = "rollout_worker.engines.sglang.child_process.loader.load"


def run_child(descriptor: int, flags: Sequence[str]) -> None:
    """Start the engine, serve until the worker is gone, and end this process."""
    patches.install_patches()
    sock = socket.socket(fileno=descriptor)
    set_prometheus_multiproc_dir()
    saver = ["--enable-memory-saver"] if _can_save_memory() else []
    engine = _ChildEngine(server_args=prepare_server_args([*saver, *flags]))
    # Only the first node, where requests come in, has a tokenizer manager.
    head = engine.tokenizer_manager is not None
    serve = _ChildServer(engine).serve_worker if head else _attend_member_node
    engine.loop.run_until_complete(serve(sock))
    os._exit(0)


async def _attend_member_node(sock: socket.socket) -> None:
    """Keep the schedulers of a member's node running until the worker is gone."""
    reader, writer = await asyncio.open_unix_connection(sock=sock, limit=MAX_LINE_BYTES)
    writer.write(encode_frame({"ready": {"version": __version__}}))
    await reader.read()


class _ChildEngine(Engine):  # type: ignore[misc]
    """SGLang's engine with our schedulers, and without its detokenizer."""

    run_scheduler_process_func = staticmethod(patches.run_scheduler)

    @classmethod
    def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_available():
            # Forks start in half the time and share the libraries' memory; CUDA doesn't survive a fork.
            multiprocessing.set_start_method("fork", force=True)
        return super()._launch_scheduler_processes(*args, **kwargs)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> tuple[list[Any], list[str]]:
        return [], []


def _can_save_memory() -> bool:
    """Whether memory can be given back: SGLang's own saver needs a GPU, a substitute may not."""
    saver = adapter.TorchMemorySaverAdapter.create(enable=True)
    return torch.cuda.is_available() or not isinstance(saver, adapter._TorchMemorySaverAdapterReal)


class _ChildServer:
    """Answers the worker."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._info = engine._scheduler_init_result.scheduler_infos[0]
        self._writer: asyncio.StreamWriter
        self._tasks: set[asyncio.Task[None]] = set()
        self._fresh: list[Any] = []  # token frames not sent yet
        self._pictures = ChildPictures(Path(self._manager.model_path))
        self._calling = asyncio.Lock()  # one socket, on which answers come in the order of calls

    async def serve_worker(self, sock: socket.socket) -> None:
        """Serve the worker until its end closes."""
        reader, self._writer = await asyncio.open_unix_connection(sock=sock, limit=MAX_LINE_BYTES)
        self._send_message({"ready": await self._describe_engine()})
        while line := await reader.readline():
            call = json.loads(line)
            if call["op"] == "generate":
                await self._start_request(call["args"])
            elif call["op"] in PICTURE_COMMANDS:
                getattr(self._pictures, call["op"])(**call["args"])
            else:
                task = asyncio.get_running_loop().create_task(self._answer_call(call))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _send_message(self, message: Any) -> None:
        self._flush_tokens()  # an answer never overtakes tokens
        self._writer.write(encode_frame(message))

    async def _describe_engine(self) -> dict[str, Any]:
        state = (await self._manager.get_internal_state())[0]
        refusal = None  # why the schedulers would refuse every update
        try:
            await self._do_call_ranks("rollout_check")
        except OSError as error:
            refusal = str(error)
        keep = (
            *("disable_overlap_schedule", "disable_radix_cache", "enable_memory_saver"),
            *("enable_return_routed_experts", "enable_lora"),
        )
        return {
            "version": __version__,
            "max_tokens": self._info["max_total_num_tokens"],
            "max_running": state.get("effective_max_running_requests_per_dp")
            or state.get("max_running_requests"),
            "no_updates": refusal,
            "device": torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
            "ranks": state.get("tp_size", 1) * state.get("pp_size", 1),
            **{name: bool(state.get(name)) for name in keep},
        }

    async def _answer_call(self, call: dict[str, Any]) -> None:
        operation: Callable[..., Awaitable[Any]] = getattr(self, f"_do_{call['op']}")
        try:
            result = await operation(**call["args"])
        except Exception as error:
            logger.exception("%s failed", call["op"])
            self._send_message({"id": call["id"], "error": f"{type(error).__name__}: {error}"})
        else:
            self._send_message({"id": call["id"], "result": result})

    # Tokens.

    async def _start_request(self, args: dict[str, Any]) -> None:
        """Hand a request to the schedulers; an `_OutputReader` gets what they make."""
        rid, manager = args["rid"], self._manager
        scored, placed = args.pop("scored"), args.pop("pictures")
        try:
            request = messages.GenerateReqInput(stream=True, **args)
            request.normalize_batch_and_arguments()
            if request.lora_path:
                await manager._validate_and_resolve_lora(request)
            manager._init_req_state(request)
            state = manager.rid_to_state[rid]
            state.event = _OutputReader(rid, state.out_list, self._deliver_tokens, scored)
            await manager._send_one_request(await self._tokenize_request(request, placed))
        except Exception as error:
            logger.exception("request %s failed", rid)
            manager.rid_to_state.pop(rid, None)
            self._deliver_tokens([rid, [], None, {"error": f"{type(error).__name__}: {error}"}])

    async def _tokenize_request(self, request: Any, placed: list[Any]) -> Any:
        """Return what the schedulers get; `placed`: the request's pictures."""
        manager = self._manager
        if not placed:
            return await manager._tokenize_one_request(request)
        ids = request.input_ids
        pictures = self._pictures.place_pictures(placed)
        inputs = await asyncio.to_thread(
            self._pictures.make_inputs, ids, pictures, request.extra_key
        )
        manager._validate_one_request(request, ids)
        return manager._create_tokenized_object(request, None, ids, None, inputs)

    def _deliver_tokens(self, tokens: Any) -> None:
        """Send what one step made in one frame."""
        if not self._fresh:
            asyncio.get_running_loop().call_soon(self._flush_tokens)
        self._fresh.append(tokens)

    def _flush_tokens(self) -> None:
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            self._writer.write(encode_frame({"tokens": fresh}))

    # Commands.

    async def _do_abort(self, rids: list[str]) -> None:
        for rid in rids:
            state = self._manager.rid_to_state.get(rid)
            if state is not None:
                state.abort_sent = False  # sent while it ran; now it may wait in the queue
            self._manager.abort_request(rid)

    async def _do_pause(self, mode: str) -> dict[str, int]:
        """Return how many tokens each request had made when the steps stopped."""
        await self._manager.pause_generation(messages.PauseGenerationReqInput(mode=mode))
        # The command itself is not answered; the next one through the same queue is.
        await self._manager.get_internal_state()
        states = self._manager.rid_to_state
        return {rid: len(state.output_ids) for rid, state in states.items()}

    async def _do_resume(self) -> None:
        go_on = messages.ContinueGenerationReqInput(torch_empty_cache=torch.cuda.is_available())
        await self._manager.continue_generation(go_on)
        await self._manager.get_internal_state()

    async def _do_load(self, ticket: str, version: str | None = None, flush: bool = False) -> None:
        """Run `loader.load` in every scheduler."""
        tensor = torch.frombuffer(bytearray(ticket.encode()), dtype=torch.uint8)
        payload = pickle.dumps([("load", tensor)])
        update = messages.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[payload] * self._manager.server_args.tp_size,
            load_format=LOADER_PATH,
            flush_cache=flush,
            weight_version=version,
        )
        manager = self._manager
        for step, message in (
            (manager.begin_weight_update, messages.BeginWeightUpdateReqInput(selector="all")),
            (manager.update_weights_from_tensor, update),
            (manager.end_weight_update, messages.EndWeightUpdateReqInput()),
        ):
            done, why = await step(message)
            if not done:
                raise RuntimeError(why)

    async def _do_load_adapter(self, name: str, path: str) -> None:
        load = messages.LoadLoRAAdapterReqInput(lora_name=name, lora_path=path)
        done = await self._manager.load_lora_adapter(load)
        if not done.success:
            raise ValueError(done.error_message)

    async def _do_unload_adapter(self, name: str) -> None:
        unload = messages.UnloadLoRAAdapterReqInput(lora_name=name)
        await self._manager.unload_lora_adapter(unload)

    async def _do_call_ranks(self, method: str, **args: Any) -> None:
        """Run one of the methods that `patches` adds in every scheduler."""
        # SGLang passes only flat arguments.
        command = {"command": json.dumps(args)} if args else {}
        try:
            async with self._calling:
                await asyncio.to_thread(self._engine.collective_rpc, method, **command)
        except AssertionError as error:  # what SGLang raises when a scheduler failed
            raise OSError(str(error)) from error

    async def _do_release(self, tags: list[str]) -> None:
        give = messages.ReleaseMemoryOccupationReqInput(tags=with_graph_tags(tags))
        await self._manager.release_memory_occupation(give)
        # Only the first rank answers. Devices are handed over next, so wait for the others, too.
        await self._do_call_ranks("rollout_meet")

    async def _do_retake(self, tags: list[str]) -> None:
        if SOCKET in os.environ:
            await self._do_call_ranks("rollout_share_turn")
        take_back = messages.ResumeMemoryOccupationReqInput(tags=with_graph_tags(tags))
        await self._manager.resume_memory_occupation(take_back)

    async def _do_freeze_heaps(self) -> None:
        """Freeze the heap of this process, and of each scheduler; SGLang does so only where it is asked to over HTTP."""
        await self._do_call_ranks("rollout_freeze_heap")
        freeze_heap()

    async def _do_flush(self) -> bool:
        return bool((await self._manager.flush_cache()).success)

    async def _do_metrics(self) -> str:
        from prometheus_client import CollectorRegistry, generate_latest, multiprocess

        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return (await asyncio.to_thread(generate_latest, registry)).decode()


class _OutputReader:
    """Stands in for the event of a request: passes outputs on where SGLang would wake a reader."""

    def __init__(
        self,
        rid: str,
        outputs: list[Any],
        deliver: Callable[[Any], None],
        scored: tuple[int, int] | None,
    ) -> None:
        self._rid = rid
        self._outputs = outputs
        self._deliver = deliver
        self._scored = scored  # until the scores of the prompt have come

    def set(self) -> None:
        """Pass on what SGLang has put into the list, which it does before it sets its event."""
        for output in self._outputs:
            tokens = to_child_tokens(self._rid, output)
            if self._scored is not None and output["meta_info"].get("input_token_logprobs"):
                tokens[-1]["prompt"] = pack_prompt(output["meta_info"], *self._scored)
                self._scored = None
            self._deliver(tokens)
        self._outputs.clear()
