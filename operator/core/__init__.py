"""Decisions: plain values in, plain values out. `plan_pass` is the door.

No clock, no network, no cache, no logging in here: the caller passes everything in.
"""
