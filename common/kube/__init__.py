"""The API server as operator and client reach it: credentials, requests, errors, list and watch.

Nothing here knows a resource of ours: callers give paths, and say over which HTTP client to
send. The kubernetes package is never imported.
"""
