"""The callers of a port and what they may do: modes of authentication, and the answers of an API server."""
