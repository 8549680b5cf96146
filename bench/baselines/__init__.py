"""The other ways to do the same work, and ours as it is called next to them."""
