"""Checks of an image without a GPU; `probes/` runs inside it, the rest outside."""
