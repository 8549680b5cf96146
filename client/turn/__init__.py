"""The trainer's turn on accelerators that it shares with a pool: `pool.turn()`, or the locks alone.

What decides is the locks of the node (`rollout_common.turn`), one file for each device; asking the pool to
sleep only makes its workers give theirs back. `session` says how the ranks of a trainer take them
together, `devices` asks the API server which devices this pod has, `command` is `rollout-turn`. Nothing here generates or balances.
"""

from rollout_common.turn import Turn

from .local import local_turn
from .plan import Agreement, TurnOptions
from .session import HeldTurn
from .turn_devices import pod_devices

__all__ = ["Agreement", "HeldTurn", "Turn", "TurnOptions", "local_turn", "pod_devices"]
