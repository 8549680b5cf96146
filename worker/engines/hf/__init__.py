"""The Hugging Face engine: transformers models, in-process, on CPU or one accelerator.

The journey of a request: `engine.py` (asyncio side) hands it to `thread.py` (the step thread),
which runs `core.py`: the queue, admission, and one step after another. A step lets `forward.py` run
the model over the rows of `kv.py`, `sampling.py` draws a token for each row, `engines/request_checks.py` decides
whether it was the last. `weights/loading.py` makes the model; `weights/memory.py` swaps, spills and drops weights.
"""
