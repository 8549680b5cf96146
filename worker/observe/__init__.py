"""What is measured: the Prometheus metrics and the processes below the worker.

It only looks. Nothing in here changes what the worker does.
"""
