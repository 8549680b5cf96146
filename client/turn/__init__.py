"""The trainer's turn on accelerators that it shares with a pool: `pool.turn()`, or the locks alone.

The locks of the node decide (`rollout_common.turn`), one file for each device; when the pool sleeps, its workers
give theirs back. `session` says how the ranks of a trainer take the turn together, `turn_devices` asks the API
server for the devices of this pod, `command` is `rollout-turn`.
"""

from rollout_common.turn import Turn

from .locks import HeldTurn, local_turn
from .plan import Agreement, TurnOptions
from .turn_devices import pod_devices

__all__ = ["Agreement", "HeldTurn", "Turn", "TurnOptions", "local_turn", "pod_devices"]
