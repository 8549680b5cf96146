"""What all parts of a worker share: state, holds, fence, the lock, guarded calls to the engine.

No part's own logic belongs here, and nothing here knows about the parts.
"""
