"""Decisions: plain values in, plain values out. `decide` is the door.

No clock, no network, no cache, no logging in here: the caller passes everything in.
"""
