"""Pictures of requests: decoded and checked once, and kept by the hash of their bytes."""
