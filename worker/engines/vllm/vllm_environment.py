"""What vLLM reads of the environment: settings of ours, and in a gang where its nodes are."""

from __future__ import annotations

import os
from collections.abc import Callable

from rollout_worker.engine import GangMembership
from rollout_worker.engines.network import find_interface, own_address, resolve_address
from rollout_worker.engines.shared_memory.sinks import SLOTS_VARIABLE

from .settings import VllmSettings


def prepare_environment() -> None:
    """Set what vLLM reads of the environment, unless somebody did; how it starts processes in any case."""
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


def join_gang(gang: GangMembership, settings: VllmSettings, cancelled: Callable[[], bool]) -> str:
    """Set what the ranks of this node read of the environment; returns the head's address.

    Raises:
        EngineError: there is no way to the head.
        ReadCancelled: `cancelled` said so.
    """
    leader = resolve_address(gang.leader, cancelled)
    own = own_address(leader)
    os.environ[SLOTS_VARIABLE] = str(gang.slots)
    defaults = {
        "VLLM_HOST_IP": own,
        "GLOO_SOCKET_IFNAME": find_interface(own),
        # A step over the network hangs where one on a node fails; longer is the watch's to say.
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(max(1, round(settings.step_deadline_seconds))),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    return leader
