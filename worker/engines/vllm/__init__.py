"""The vLLM engine: vLLM's `AsyncLLM` in the worker's loop, its core and workers in processes beside.

The journey of a request: `engine.py` makes a `Stream` (`streams.py`), which waits at the `Gate`
(`gate.py`) until vLLM has room, is handed over, and turns vLLM's outputs into deltas: `intake.py`
translates what was asked, `labels.py` says which weights made which token. `launch.py` makes the
engine; `versions.py` gives memory for weights (`engines/mapped.py`), commits, sleeps and wakes;
`extension.py` is the part of us that runs inside vLLM's workers.
"""
