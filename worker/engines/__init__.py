"""The engines, made by name; importing this module imports none of them.

An adapter for another engine implements `rollout_worker.engine.Engine` and gets a line in `create_engine`.
"""

from __future__ import annotations

from pathlib import Path

from rollout_common.garbage_collection import without_garbage_collection
from rollout_worker.engine import ENGINES, Engine, EngineError, EngineMember

from .answer_parsers import HERMES_ONLY, EngineParsers, ParserNames
from .model_folder import load_tokenizer
from .options import EngineOptions

__all__ = ["EngineOptions", "check_parsers", "create_engine", "create_member", "find_parsers"]


def create_engine(engine: str, options: EngineOptions) -> Engine:
    """Make an engine; nothing is loaded before its `start`.

    Raises:
        EngineError: an unknown engine or flag; the text lists those that exist.
    """
    # It would take a tenth of the imports' time and find nothing: modules stay.
    with without_garbage_collection():
        if engine == "hf":
            if options.gang is not None:
                raise _single_node_error(engine)
            from .hf.hf_engine import HfEngine

            return HfEngine(options)
        if engine == "vllm":
            from .vllm.vllm_engine import VllmEngine

            return VllmEngine(options)
        if engine == "sglang":
            from .sglang.sglang_engine import SglangEngine

            return SglangEngine(options)
    raise EngineError(f"engine {engine!r} is unknown: use one of {', '.join(ENGINES)}")


def create_member(engine: str, options: EngineOptions) -> EngineMember:
    """Make the part of an engine that runs on a node other than the head's.

    Raises:
        EngineError: this engine runs on one node.
    """
    # It would take a tenth of the imports' time and find nothing: modules stay.
    with without_garbage_collection():
        if engine == "vllm":
            from .vllm.vllm_member import VllmMember

            return VllmMember(options)
        if engine == "sglang":
            from .sglang.sglang_node import SglangMember

            return SglangMember(options)
    raise _single_node_error(engine)


def find_parsers(engine: str) -> EngineParsers:
    """Return the parsers of answers that come with an engine; blocks while its modules are imported.

    Raises:
        EngineError: the engine is not installed where the worker runs.
    """
    try:
        with without_garbage_collection():
            if engine == "vllm":
                from .vllm.vllm_parsers import vllm_parsers

                return vllm_parsers()
            if engine == "sglang":
                from .sglang.sglang_parsers import sglang_parsers

                return sglang_parsers()
    except ImportError as error:
        raise EngineError(
            f"the parsers of {engine} can't be imported: {error}; install it where the worker runs, or leave"
            " --tool-call-parser and --reasoning-parser out"
        ) from error
    return HERMES_ONLY


def check_parsers(names: ParserNames, folder: Path) -> None:
    """Refuse parsers that the engine does not have, or that can't be used with a model's tokenizer; blocks.

    Raises:
        EngineError: names the flag and the fix.
    """
    if names.tool is None and names.reasoning is None:
        return
    parsers = find_parsers(names.engine)
    parsers.check_names(names)
    parsers.make_parser(names.tool, names.reasoning, load_tokenizer(folder))


def _single_node_error(engine: str) -> EngineError:
    return EngineError(
        f"parallelism.nodes: the {engine} engine runs on one node: set it to 1, or use vllm or sglang"
    )
