"""The operator's side of the control ports: polls, calls under way, connections.

It carries out calls that a pass has planned, and never plans one itself.
"""
