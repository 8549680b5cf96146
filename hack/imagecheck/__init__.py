"""What an image must show before a GPU is at hand; `probes/` runs inside of it, the rest outside."""
