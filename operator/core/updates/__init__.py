"""How a pool moves from one version of its weights to the next. Pure; `update_planning` is the entry.

The stored phase is the decision: commit calls are planned only when the status that was read
says `Committing`, so a crash can't undo a commit that has begun.
"""
