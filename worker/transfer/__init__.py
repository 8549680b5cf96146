"""How weights travel: their layout, the memory that they lie in, the frames that carry them.

Standard library and xxhash only (torch inside of functions that take tensors): the client uses it, too.
"""
