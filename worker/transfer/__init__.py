"""How tensors travel from a trainer's memory to a worker's: what both ends share.

`layout` says where each tensor lies in a version's memory, `arena` is that memory where both ends
share a machine, `frames` is what they say to each other, `buckets` packs tensors for a channel that
takes pieces of a fixed size. Nothing here knows of engines, pools or requests; torch is imported only
where tensors are touched.
"""
