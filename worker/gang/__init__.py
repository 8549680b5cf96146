"""A replica of several nodes: its head watches and asks the members, a member obeys its head.

Nothing of engines lives here, and no routes; who is asked over HTTP is a member's control port.
"""
