"""Interfaces of other trainers and schedulers over a pool: verl's rollout, a pool in a Ray actor.

Each module uses only the public pool, and imports torch or ray within functions, so that importing
it costs nothing. No other package imports from here.
"""
