"""What is measured: the Prometheus metrics, and the worker's child processes.

It only observes. Nothing here changes what the worker does.
"""
