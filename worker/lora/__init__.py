"""LoRA adapters in a worker: what of a version is one, what must fit the model, and the memory they are staged in.

Not here: how an engine applies them (`engines/`), and their wire form (`rollout_common.wire.adapters`).
"""
