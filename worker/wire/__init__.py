"""The models that cross a process border, and every problem that an answer can be.

Pure data, imported by clients through `rollout_worker.schemas`; no torch, no web framework.
"""
