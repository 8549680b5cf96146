"""Weights changing under load: order of versions, staging slot, commit.

This package decides which weights serve. `sources` finds their bytes, and the engine holds them.
"""
