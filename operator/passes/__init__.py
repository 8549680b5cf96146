"""One pass over a pool: observe, decide, act; and the loop that runs passes.

The only package that writes to the cluster. What to write is decided in `core`.
"""
