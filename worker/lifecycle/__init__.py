"""What moves the worker from state to state: verbs, the governor, the engine's supervisor.

`core` has the table of moves and the shared state; weights change in `updates`.
"""
