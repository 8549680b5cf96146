"""What moves the worker from state to state: verbs, the governor, the engine's supervisor.

The table of moves and the shared state are in `core`; weights change in `updates`.
"""
