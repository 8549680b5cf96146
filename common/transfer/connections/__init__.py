"""Connections that carry weights: frames, sockets, TLS, and the loop on which they run.

`frame_stream` is a connection on the transfer loop, between a trainer and workers and among workers;
`blocking_connection` is one between the ranks of a trainer, for threads.
"""
