"""Pushed weights as a source: from a trainer's memory, over TCP, from other workers, whole or as deltas.

`pushed_source` is what the rest of the worker uses.
"""
