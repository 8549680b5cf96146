"""Where bytes come from: paths that are allowed, safetensors files, the model hub.

Engines don't look for weights: whatever fetches bytes goes in here.
"""
