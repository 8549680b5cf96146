"""The command `rollout`, also as kubectl's plugin `kubectl rollout-pool`."""
