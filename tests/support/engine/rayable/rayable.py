"""A plug-in of vLLM's, found by the entry point beside it; vLLM asks it which platform it has."""

from __future__ import annotations


def platform() -> str:
    return "rayable_cpu.RayableCpu"
