"""How a pool moves from one version of its weights to the next. Pure; `plan_pass` is the door.

The stored phase is the decision: commit calls are planned only when `Committing` stands in the
status that was read, so a crash can't undo a commit that has begun.
"""
