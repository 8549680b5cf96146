"""SGLang as a supervised child process.

The worker's side (`engine`, `process`, `connection`, `streams`, `versions`) imports neither
torch nor SGLang. The child's side (`child`, `serving`, `sampler`, `loader`) runs inside
SGLang's processes. Both ends of one socket pair is all that joins them, see `connection`.
"""
