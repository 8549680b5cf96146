"""Requests in flight: admission, one pump per output, abort, clients that disconnect.

It knows the engine only through its contract, and knows nothing about HTTP routes.
"""
