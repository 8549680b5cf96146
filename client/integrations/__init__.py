"""Interfaces of other trainers and schedulers over a pool: verl's rollout, a pool in a Ray actor.

Each module uses the public pool only. Packages of its own (torch, ray) it imports within functions,
so that importing it costs nothing; no other room imports from here.
"""
