"""What runs in vLLM's own processes, its ranks and its scheduler, and what they send."""
