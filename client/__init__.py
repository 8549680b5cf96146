"""What callers of rollout workers use: today the control-port client, later the trainer's SDK."""
