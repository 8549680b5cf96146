"""What all parts of one worker share: state, holds, the lock, guarded calls to the engine.

No part's own logic belongs in here, and nothing in here knows the parts.
"""
