"""What the operator believes the cluster holds, and which pools to look at next.

Watch streams and lists fill it. It decides nothing and never asks a worker.
"""
