"""A pool of workers on this machine: no cluster, no root. `rollout up` starts one, and `LocalWorkers` does in a program."""

from .local_workers import LocalPlan, LocalPoolFailed, LocalWorkers

__all__ = ["LocalPlan", "LocalPoolFailed", "LocalWorkers"]
