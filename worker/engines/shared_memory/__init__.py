"""Memory of staged weights that the worker fills and an engine's own processes map."""
