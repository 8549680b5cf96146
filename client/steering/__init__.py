"""What a trainer does to a pool besides generating: epochs, weights, sleep, wake and pause.

`cluster` asks the operator through the RolloutReplica, `direct` the workers themselves; `protocol`
says what both can do, `verbs` offers it to users; `spool` and `versions` write weights and delete old
ones. Nothing here generates or balances.
"""
