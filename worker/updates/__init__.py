"""Weights changing under load: the staging slot, the fence, the commit.

It decides which weights serve. How bytes are found is `sources`, how they are held the engine's.
"""
