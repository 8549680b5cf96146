"""Ten minutes on one GPU: start each engine's worker, and check what only a GPU can show.

`python -m gpu_smoke` runs it (`make gpu-smoke`), with the tests' own code to start workers and to judge tokens.
Nothing that is shipped imports it.
"""
