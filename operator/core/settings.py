"""How long things may take in this package, and why."""

from __future__ import annotations

# failures.py

FAILURE_RESET_SECONDS = 600.0
"""A replica that failed this long after it had proven itself counts from zero again."""


# head_planner.py

CALL_SLACK_SECONDS = 15.0
"""What a call may take beyond the time that the worker itself is given."""

QUICK_CALL_SECONDS = 10.0

WEIGHTS_LOAD_SECONDS = 600.0
"""Longest wait for weights to come back from where they sleep."""


# pass_planning.py

KUBELET_READY_SECONDS = 30.0
"""How long a pod whose gate is on may take to be Ready before something is wrong with it."""


# replica_troubles.py

UNREACHABLE_AFTER_SECONDS = 60.0
"""How long a control port may be silent before that is told as trouble."""

UNSCHEDULABLE_AFTER_SECONDS = 60.0
"""How long a pod may be without a node before that is told: an autoscaler may be making one."""


# stuck_pods.py

FORCED_DELETION_SECONDS = 30.0
"""A pod still there this long after its grace period (a dead node, a finalizer) is deleted with grace
0, and again each time this long after."""


# trainer_pods.py

TRAINERS_SETTLED_SECONDS = 60.0
"""How long the trainer's pods have to be the same before an engine moves because of their order: a
StatefulSet or a Job brings a lost pod back within 10 s, unless its node is lost."""
