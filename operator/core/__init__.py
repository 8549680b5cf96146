"""Decisions: plain values in, plain values out. `pass_planning.plan_pass` is the entry.

No clock, no network, no cache, no logging in here: the caller passes everything in.
"""
