"""What moves the worker from state to state: verbs, holds carried out, the engine's life.

The table of moves itself and the shared state are `core`; weights are changed in `updates`.
"""
