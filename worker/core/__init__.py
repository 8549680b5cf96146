"""What all parts of a worker share: state, holds, fence, the lock, guarded calls to the engine.

The logic of one part does not belong here, and nothing here knows the parts.
"""
