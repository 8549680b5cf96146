"""Sources of weights: allowed paths, safetensors files, the model hub; a sender's memory, TCP, peers, deltas.

Engines don't fetch weights: all code that fetches bytes belongs in this package.
"""
