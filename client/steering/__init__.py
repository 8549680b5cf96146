"""What a trainer does to a pool besides generating: epochs, weights, sleep, wake and pause.

`cluster_steering` asks the operator through the RolloutReplica, `direct_steering` the workers
themselves; `steering_protocol` states what both can do, `steering_verbs` offers it to users; `spool`
and `version_folder` write weights and delete old ones. Nothing here generates or balances.
"""
