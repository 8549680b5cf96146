"""A publish of several ranks: rank 0, the leads of other nodes, the ranks that they lead, and how they find each other."""
