"""Where bytes come from: allowed paths, safetensors files, the model hub; a sender's memory, TCP, peers, deltas.

Engines don't look for weights: whatever fetches bytes goes in here.
"""
