"""Who calls a port, and what they may: modes of authentication, and the answers of an API server."""
