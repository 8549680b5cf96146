"""What a trainer does to a pool besides generating: epochs, weights, sleep, wake and pause.

`cluster` asks the operator through the RolloutReplica, `direct` the workers themselves; `protocol`
says what both can do, `verbs` offers it to users. Nothing here generates or balances.
"""
