"""How weights travel: their layout, the memory that they lie in, the frames that carry them.

`layout` says where each tensor lies in a version's memory, `arena` is that memory where both ends
share a machine, `frames` what goes over a `connection`, `delta` what differs between two versions (by `native` code, or
by numpy in `vectors`), `buckets` packs tensors for a channel that takes pieces of a fixed size. Standard library and
xxhash only (torch inside of functions that take tensors, numpy of those that take deltas): the client uses it, too.
"""
