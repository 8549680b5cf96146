"""A real Kubernetes on one machine, without Docker: built once from Go modules, started in seconds.

The control plane is plain processes on loopback (no root). A node is a tree of processes in
namespaces of its own, joined to a bridge (root). Everything is kept in one cache folder; a running
cluster is one folder below it plus marked processes, and `down` removes both.

Only the standard library is used: this runs before any environment exists. What the surroundings don't
allow, or a step that fails, is a ClusterError.
"""

from .cluster import Cluster
from .home import ClusterError

__all__ = ["Cluster", "ClusterError"]
