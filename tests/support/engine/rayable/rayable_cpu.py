"""vLLM's CPU as what Ray schedules: by the name that it has for GPUs, of which `ray start` gets some."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class RayableCpu(CpuPlatform):  # type: ignore[misc,unused-ignore]
    """vLLM has no name for a CPU under Ray (0.32), and refuses one without a name."""

    ray_device_key = "GPU"
