"""The rollout worker: one process, one inference engine, two ports.

`schemas` holds the wire models that trainers and the operator share; everything else here runs
only inside a worker. Importing this package pulls in neither torch nor a web server.
"""
