"""The API server: how to reach it (`access`), and the few requests that the client makes (`client`).

Nothing here knows what a RolloutReplica or an EndpointSlice means: `discovery` and `steering` do.
httpx alone; the kubernetes package is never imported.
"""
