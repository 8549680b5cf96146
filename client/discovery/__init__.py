"""Who is in the pool: members from a fixed list, from DNS, or from a RolloutReplica's EndpointSlices.

Discovery says who exists and never asks a worker anything: whether a member may get requests now is
for `routing` to know. No weights, no tokens, no retries of requests here.
"""
