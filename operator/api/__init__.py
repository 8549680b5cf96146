"""The custom resource as the API server knows it: names, models, CRD, revision.

Raw objects are JSON (`Obj`) found by their pool (`Key`). Nothing in here acts, waits or decides.
"""
