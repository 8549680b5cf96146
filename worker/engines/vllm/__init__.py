"""The vLLM engine: vLLM's `AsyncLLM` in the worker's loop, its core and workers in processes beside.

The journey of a request: `engine.py` makes a `Stream` (`streams.py`), which waits in the `AdmissionQueue`
(`engines/admission_queue.py`) until vLLM has room, is passed to vLLM (`traffic.py`), and turns vLLM's outputs
into deltas: `intake.py` translates what was asked, `Labels` say which weights made which token. `launch.py` makes
the engine; `versions.py` gives memory for weights (`engines/shared_memory`), commits, sleeps and wakes;
`extension.py` is the part of us that runs inside vLLM's workers.
"""
