"""The models that cross a process boundary, and every problem a worker can answer with.

Pure data that clients import through `rollout_worker.schemas`: no torch, no web framework.
"""
