"""Weights changing under load: order of versions, staging slot, commit.

It decides which weights serve. How bytes are found is `sources`, how they are held the engine's.
"""
