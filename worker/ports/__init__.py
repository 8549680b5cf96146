"""Both HTTP ports: applications, routes, authentication, sockets.

Routes translate between HTTP and the worker; no rule about requests or weights lives in here.
"""
