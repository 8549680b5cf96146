"""How long things may take in this package, and why."""

from __future__ import annotations

FAILURE_RESET_SECONDS = 600.0
"""A replica that failed this long after it had proven itself counts from zero again; the kubelet resets a
container's back-off after the same ten minutes."""

CALL_SLACK_SECONDS = 15.0
"""What a call may take beyond the time that the worker itself has: the network, and a busy event loop."""

QUICK_CALL_SECONDS = 10.0
"""What a call may take that only changes a few fields of the worker's state: milliseconds, to which a busy
event loop may add seconds."""

WEIGHTS_LOAD_SECONDS = 600.0
"""Longest wait for weights to come back from where they sleep: a large model on a slow volume."""

KUBELET_READY_SECONDS = 30.0
"""How long a pod whose gate is on may take to be Ready before something is wrong with it: its probe runs every
2 s, and the kubelet of a full node may be late."""

UNREACHABLE_AFTER_SECONDS = 60.0
"""How long a control port may be silent before status reports it: a node's short outage passes."""

UNSCHEDULABLE_AFTER_SECONDS = 60.0
"""How long a pod may be without a node before status reports it: an autoscaler may be adding one."""

FORCED_DELETION_SECONDS = 30.0
"""A pod still there this long after its grace period (a dead node, a finalizer) is deleted with grace
0, and again each time this long after."""

TRAINERS_SETTLED_SECONDS = 60.0
"""How long the trainer's pods have to be the same before an engine moves because of their order: a
StatefulSet or a Job brings a lost pod back within 10 s, unless its node is lost."""

NODE_TOLERATION_SECONDS = 30
"""How long a pod waits for a lost node; Kubernetes' default of 300 s is long for a pool that serves."""

GANG_TOKEN_SECONDS = 3600
"""Validity of a gang's token, Kubernetes' usual hour; the kubelet renews it after four fifths."""
