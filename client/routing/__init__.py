"""Which member gets the next request: choice, leases, health, and the connections to members.

It knows members and which weights they serve, but nothing of tokens or of how a request ends: what
an answer means is decided in `generating`, and told to the balancer from there.
"""
