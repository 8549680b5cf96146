"""Memory that weights lie in: shared with other processes, mapped, page-locked, kept for the next version.

`memory_users` asks the kernel which processes still have it, `memory_limits` how much of it this process may take.
`exported_memory` is memory of a GPU, which other processes of the node copy on that GPU.
"""
