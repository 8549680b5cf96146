"""The way to the API server: requests, credentials, their errors, the Lease, events.

It knows resources and namespaces, but not pools: what an object means is decided above.
"""
