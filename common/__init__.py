"""What the operator, the client and the worker share: wire models, the turn, the transfer of weights, logs.

Nothing here knows an engine, a web server or Kubernetes' API; torch is imported only by functions that take tensors.
"""
