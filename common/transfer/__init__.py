"""How weights travel: their layout, the memory that they lie in, the connections that carry them.

`layout` says where each tensor lies in a version's memory, and `pieces` how that is cut. `held_version` knows which
pieces are here; `piece_server` sends them, `piece_fetcher` gets them. `connections` carry frames, `memory` is what one
machine shares. `delta` finds and applies what differs between two versions, by `delta_native` code or by numpy
(`delta_words`). The client imports this package, so it needs the standard library and xxhash only; torch and numpy are
imported inside functions.
"""
