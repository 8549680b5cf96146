"""Requests in flight: admission, one pump per output, abort, the client that goes away.

It knows the engine by its contract only, and nothing of HTTP routes.
"""
