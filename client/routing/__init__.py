"""Which member gets the next request: choice, leases and health.

It knows members and the weights that they serve, but neither tokens nor answers: `generating`
decides what an answer means, and notes it in the balancer.
"""
