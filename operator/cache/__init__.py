"""What the operator believes the cluster holds, and which pools to look at next.

Watch streams and lists fill it. Nothing is decided in here, and it never asks a worker.
"""
