"""kopf, without the official client of Kubernetes.

kopf imports that where it is installed, to recognise its objects, and we give it none: 280 modules, 10 MiB and a seventh of
the CPU of the operator's start. Our login imports it where a kubeconfig asks for what only it can do.
"""

from __future__ import annotations

import sys

_UNUSED = "kubernetes"

_hidden = _UNUSED not in sys.modules
if _hidden:
    sys.modules[_UNUSED] = None  # type: ignore[assignment] # as the import system marks what is not there
try:
    import kopf
finally:
    if _hidden:
        del sys.modules[_UNUSED]

__all__ = ["kopf"]
