"""The turn: which process of a node may hold accelerator memory, decided by one lock for each device.

Trainers import this package, too, so it uses nothing but the standard library
(docs/decisions/020-one-lock-shared-by-every-process.md).
"""

from rollout_common.turn.errors import TurnError, TurnReplaced, TurnTimeout
from rollout_common.turn.turns import Turn

__all__ = ["Turn", "TurnError", "TurnReplaced", "TurnTimeout"]
