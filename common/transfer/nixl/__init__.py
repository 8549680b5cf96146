"""Pieces that are read by NIXL, from the registered memory of their holder: over RDMA where there is any, else over TCP.

NIXL can't take back a transfer: one that was given up still writes once its holder wakes. So it runs in processes of
its own that can be killed, and the one that reads has a ring, never the memory of a version.
"""
