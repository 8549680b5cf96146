"""Both HTTP ports: applications, routes, authentication, sockets.

Routes translate between HTTP and the worker; no rules about requests or weights belong here.
"""
