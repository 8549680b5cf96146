"""Main module of the child: `python -m rollout_worker.engines.sglang.child FD PARENT FLAG...`.

Light, as SGLang imports the main module again in every process that it spawns.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from importlib.metadata import version

from rollout_worker.engines import tested
from rollout_worker.engines.sglang.devices import number_devices
from rollout_worker.turn.sharing import join

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends; `parent` may be gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Serve the worker at the other end of the socket `FD` until it closes."""
    descriptor, parent, flags = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    die_with_parent(parent)
    join()  # this process has no memory of the device to speak of, but what it imports may look at it
    if tested.FLAG in flags:
        flags.remove(tested.FLAG)
    elif (why := tested.refusal("SGLang", version("sglang"))) is not None:
        sys.exit(f"Error: {why}")
    number_devices()
    from rollout_worker.engines.sglang import serving

    serving.run(descriptor, flags)


if __name__ == "__main__":
    main()
