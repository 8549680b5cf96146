"""A replica of several nodes: its head watches and calls the members, a member obeys its head.

Engines and routes do not belong here: the head calls a member's control port (`ports/member_port.py`).
"""
