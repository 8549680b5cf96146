"""The command line for users and admins of pools: `rollout`, which is also `kubectl rollout-pool`.

`rollout_command` parses; each verb has its module, which reads the API server and prints. What is decided
(`pool_summary`, `cause_finding`, `archive_redaction`) is pure.
"""
