#!/usr/bin/env python3
"""A real Kubernetes on this machine: build its binaries once, start and remove clusters.

    sudo python3 hack/cluster/cluster.py build            # once, minutes; then nothing to do
    sudo python3 hack/cluster/cluster.py up --nodes 2     # two real nodes, seconds
    eval "$(python3 hack/cluster/cluster.py env)"         # KUBECONFIG and PATH of this shell
    kubectl get nodes
    sudo python3 hack/cluster/cluster.py down --all       # every trace is gone

`up --nodes 0` starts a control plane only: no root, on loopback, any number side by side.
Everything is kept in $ROLLOUT_CACHE (default: .cache of the repository).
Errors of the surroundings are one sentence and exit status 2.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable

from localkube import Cluster, ClusterError, build, debian, preflight
from localkube.home import DEFAULT_NAME, say

Adder = Callable[..., argparse.Action]


def main() -> int:
    arguments = parser().parse_args()
    try:
        arguments.run(arguments)
    except ClusterError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; each command's function is its `run`, whose docstring is the help."""
    top = argparse.ArgumentParser(
        prog="cluster.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(function: Callable[[argparse.Namespace], None], *, named: bool = True) -> Adder:
        text = (function.__doc__ or "").strip()
        command = commands.add_parser(
            function.__name__.strip("_"),
            help=text.splitlines()[0].rstrip("."),
            description=text,
        )
        command.set_defaults(run=function)
        if named:
            command.add_argument(
                "--name", default=DEFAULT_NAME, help="cluster (default: %(default)s)"
            )
        return command.add_argument

    argument = add(_build, named=False)
    argument("component", nargs="*", help="only these (kube, helm, kwok, …)")
    argument("--without", action="append", default=[], help="leave this one out")
    argument(
        "--check-nodes", action="store_true", help="first see whether this machine can have nodes"
    )
    argument = add(_up)
    argument("--nodes", type=int, default=1, metavar="N", help="real nodes (1)")
    argument("--gpus", type=int, default=0, metavar="G", help="fake GPUs a node (0)")
    argument(
        "--devices", type=int, default=0, metavar="D", help="fake devices a node, for claims (0)"
    )
    add(_down)("--all", action="store_true", help="every cluster of this cache")
    add(_env)
    return top


def _build(arguments: argparse.Namespace) -> None:
    """Compile every binary that is missing or outdated, and fetch Prometheus."""
    if arguments.check_nodes:
        preflight.root("a cluster with nodes")
    if os.geteuid() == 0:
        debian.ensure(debian.NODE_PACKAGES)
    if arguments.check_nodes:
        preflight.real_nodes()
    build.build(arguments.component, without=arguments.without)


def _up(arguments: argparse.Namespace) -> None:
    """Start a cluster (or the nodes it lacks) and print the path of its kubeconfig."""
    if min(arguments.nodes, arguments.gpus, arguments.devices) < 0:
        raise ClusterError("--nodes, --gpus and --devices: 0 or more")
    # Before anything is compiled for minutes.
    if arguments.nodes:
        preflight.root("a cluster with nodes")
        debian.ensure(debian.NODE_PACKAGES)
        preflight.real_nodes()
    build.build()
    cluster = Cluster.start(
        arguments.name, arguments.nodes, arguments.gpus, devices=arguments.devices
    )
    print(cluster.kubeconfig)


def _down(arguments: argparse.Namespace) -> None:
    """Remove a cluster and every trace of it: processes, cgroups, links, routes, mounts, state."""
    names = Cluster.names() if arguments.all else [arguments.name]
    for name in names:
        say(f"  {name}: {'removed' if Cluster.remove(name) else 'nothing was there'}")


def _env(arguments: argparse.Namespace) -> None:
    """Print shell exports with which kubectl and helm reach the cluster."""
    for name, value in Cluster.attach(arguments.name).environment().items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    sys.exit(main())
