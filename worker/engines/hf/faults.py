"""Errors of a GPU after which no call to it in this process succeeds."""

from __future__ import annotations

import torch

SIGN = "CUDA error:"
"""How torch begins what CUDA reports, in classes that differ between its calls and versions."""

PASSING = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What a full GPU says."""


def lasting(error: BaseException | None) -> str | None:
    """Return what CUDA says, if the error or one that it came of is CUDA's own; else None.

    An illegal address or a device that fell off the bus ends CUDA's context of the process for good.
    Memory that isn't there passes.
    """
    while error is not None:
        of_cuda = isinstance(error, torch.AcceleratorError) or (
            isinstance(error, RuntimeError) and SIGN in str(error)
        )
        if of_cuda and not any(words in str(error) for words in PASSING):
            return str(error).partition("\n")[0]
        error = error.__cause__ or error.__context__
    return None


def spent(why: str) -> str:
    """Return the sentence for a process that has met such an error."""
    return f"the GPU's context of this process is lost: {why}; only a new process can use the GPU"
