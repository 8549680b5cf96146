"""Which replicas a pool has, which pods that means, what to call on their heads, and what is wrong with them. Pure."""
