"""How weights travel: their layout, the memory that they lie in, the frames that carry them.

`layout` says where each tensor lies in a version's memory. `arena` is that memory where both ends share a machine.
`frames` defines what goes over a `connection`. `delta` finds and applies what differs between two versions, by `native`
code or by numpy (`vectors`). `buckets` packs tensors for a channel that takes pieces of a fixed size. The client imports
this package, so it needs the standard library and xxhash only; torch and numpy are imported inside functions.
"""
