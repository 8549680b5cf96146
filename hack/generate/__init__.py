"""`make generate`: the CRD, docs/api.md, and the chart's schema and README, from the code.

One module for each kind of file; `__main__` writes them.
"""
