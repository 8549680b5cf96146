"""The other ways to do the same work, and ours as they are called beside them."""
