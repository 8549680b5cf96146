"""Compile a Triton kernel for an H100 and the launcher that a process compiles with it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaUtils
from triton.compiler import ASTSource

from told import tell


@triton.jit  # type: ignore[untyped-decorator]
def double(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(target + at, tl.load(source + at, mask=inside) * 2, mask=inside)


def main() -> None:
    signature = {"source": "*bf16", "target": "*bf16", "count": "i32", "BLOCK": "constexpr"}
    source = ASTSource(double, signature, {"BLOCK": 1024})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    launch = CudaUtils().launch
    tell(
        {
            "triton": triton.__version__,
            "cubin": len(kernel.asm["cubin"]),
            "target": kernel.asm["ptx"].split(".target ")[1].split()[0],
            "launcher": callable(launch),
        }
    )


if __name__ == "__main__":
    main()
