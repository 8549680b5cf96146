"""How a trainer's tensors get to the replicas of a pool: by shared memory on this machine, or by TCP.

`push_tensors` describes what there is to publish, `stream_filling` copies it to shared memory and hashes it, `routes`
chooses how each replica gets it, `sending` sends it, and `push` is one version during all of that. With several ranks,
`shards` plans who writes and sends which bytes, and `ranks` connects them. The package above decides which replicas take
part, and when they commit.
"""
