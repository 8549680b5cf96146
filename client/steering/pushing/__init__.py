"""How a trainer's tensors get to the replicas of a pool: memory of this machine, or TCP.

`tensors` says what there is to publish, `filling` brings it into shared memory and hashes it, `routes`
chooses how each replica gets it, `sending` carries it there, `push` is one version on its way. Which
replicas take part, and when they commit, is decided by the steering above.
"""
