"""Compile SGLang's rotary embedding with nvcc for an H100, link and load it, as the first step does."""

from __future__ import annotations

import torch
from sglang.kernels.jit.utils.arch import override_jit_cuda_arch
from sglang.kernels.ops.attention import rope

from told import tell


def main() -> None:
    with override_jit_cuda_arch(9, 0):
        module = rope._jit_fused_rope_module(True, 128, torch.bfloat16, torch.bfloat16)
    functions = [name for name in ("run_rope", "run_rope_store") if callable(getattr(module, name))]
    tell({"functions": functions, "torch": torch.__version__})


if __name__ == "__main__":
    main()
