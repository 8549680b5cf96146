"""The vLLM engine: vLLM's `AsyncLLM` in the worker's loop, its core and workers in child processes.

The journey of a request: `VllmRequests` makes a `VllmStream` (`vllm_streams.py`), which waits until
`SchedulerControl` (`steering.py`) admits it, hands it to vLLM as `intake.py` translates it, and turns vLLM's
outputs into deltas; `WeightLabels` say which weights made which token. `launch.py` and `vllm_member.py` start
the ranks; `vllm_versions.py` gives memory for weights (`engines/shared_memory`), commits, sleeps and wakes;
`ranks/extension.py` is the part of us that runs inside vLLM's workers.
"""
