"""The Hugging Face engine: transformers models, in-process, on CPU or one accelerator.

The way of a request: `hf_engine.py` (asyncio side) hands it to `thread.py` (the step thread), which runs `core.py`:
the admission queue, and one step after another. In a step `forward.py` runs the model over the rows of `kv.py`,
`sequence.py` draws a token for each row, and `engines/request_checks.py` decides whether it was the output's last.
`weights/loading.py` makes the model; `weights/weights_memory.py` swaps, spills and drops its weights.
"""
