"""Which settings of a worker go together, and what of this machine they need; each refusal names the fix."""

from __future__ import annotations

import ipaddress
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .settings import WorkerSettings

MAX_SOCKET_PATH = 107
"""Bytes that a Unix socket's path may have."""
_LEADER = re.compile(r"[^.]+-0(\.|$)")


class InvalidSettings(ValueError):
    """A flag or variable with an unusable value; the text names it and the fix."""


def check_settings(settings: WorkerSettings) -> None:
    """Check what no single value shows.

    Raises:
        InvalidSettings: Names the flags and the fix.
    """
    _check_authentication(settings)
    _check_writable_folders(settings.spill_dir)
    _check_gang_settings(settings)
    if (settings.turn_directory is None) != (not settings.turn_devices):
        raise InvalidSettings("give --turn-directory and --turn-devices, or neither")
    _check_weights_ports(settings)


def _check_authentication(settings: WorkerSettings) -> None:
    if settings.auth == "none" and not is_loopback(settings.control_host):
        raise InvalidSettings(
            f"--auth none would open the control port on {settings.control_host}: add"
            " --control-host 127.0.0.1, or use --auth token or --auth kubernetes"
        )
    if settings.auth == "token" and settings.auth_token_file is None:
        raise InvalidSettings(
            "--auth token needs --auth-token-file FILE; for local use only, there is"
            " --auth none --control-host 127.0.0.1"
        )
    if (settings.control_tls_cert_file is None) != (settings.control_tls_key_file is None):
        raise InvalidSettings("give --control-tls-cert-file and --control-tls-key-file, or neither")
    if settings.pool is not None and settings.namespace is None:
        raise InvalidSettings("--pool needs --namespace (or ROLLOUT_NAMESPACE)")
    if settings.auth == "kubernetes" and settings.pool is None:
        raise InvalidSettings(
            "--auth kubernetes needs --pool and --namespace: tokens are issued for one pool"
        )


def _check_writable_folders(folder: Path | None) -> None:
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        # An engine's libraries fail without, and by another name at each further attempt.
        raise InvalidSettings(
            "no folder for temporary files can be written: mount one at /tmp, or set TMPDIR to one"
            " (a read-only root file system needs that)"
        ) from error
    # Otherwise the first sleep would find out.
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise InvalidSettings(
            f"--spill-dir {folder} is not a folder that this process may write: create or mount it (in a"
            " pool, spec.sleep.spill.path names a mount of spec.podTemplate.volumeMounts)"
        )


def _check_gang_settings(settings: WorkerSettings) -> None:
    if settings.rank >= settings.nodes:
        raise InvalidSettings(
            f"--rank {settings.rank} is not below --nodes {settings.nodes}: ranks count from 0"
        )
    if settings.nodes == 1:
        return
    if settings.leader_address is None:
        raise InvalidSettings("--nodes above 1 needs --leader-address HOST: where rank 0 runs")
    if settings.rank > 0:
        return  # only the head needs the others' addresses
    if settings.member_addresses and len(settings.member_addresses) != settings.nodes - 1:
        raise InvalidSettings(
            f"--member-addresses names {len(settings.member_addresses)} workers: name each of the"
            f" {settings.nodes - 1} with a rank above 0"
        )
    if not settings.member_addresses and not _LEADER.match(settings.leader_address):
        raise InvalidSettings(
            f"--leader-address {settings.leader_address!r} does not say where the other ranks are: its"
            " first label must end in -0, or give --member-addresses"
        )
    if settings.auth == "kubernetes" and settings.gang_token_file is None:
        raise InvalidSettings(
            "--auth kubernetes with --nodes above 1 needs --gang-token-file: a token of this pod,"
            f" issued for {settings.token_audience!r}"
        )


def _check_weights_ports(settings: WorkerSettings) -> None:
    path = settings.weights_socket
    if settings.rank > 0 and (path is not None or settings.weights_port is not None):
        raise InvalidSettings(
            "--weights-port and --weights-socket with --rank above 0: only the head takes pushed"
            " weights, and the other ranks fetch them there; leave them out"
        )
    if settings.nodes > 1 and path is not None and settings.weights_port is None:
        raise InvalidSettings(
            "--weights-socket with --nodes above 1 needs --weights-port, where the other ranks fetch"
            " what came"
        )
    if settings.weights_tls == "required" and settings.control_tls_cert_file is None:
        raise InvalidSettings(
            "--weights-tls required needs --control-tls-cert-file and --control-tls-key-file: it shows the"
            " same certificate (in a pool, from the Secret of the chart's workers.controlTLS.secretName)"
        )
    if path is None:
        return
    if not path.is_absolute() or len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise InvalidSettings(
            f"--weights-socket {str(path)!r} must be an absolute path of at most {MAX_SOCKET_PATH} bytes"
        )
    if not path.parent.is_dir():
        raise InvalidSettings(
            f"--weights-socket {path}: its folder does not exist; create or mount it"
        )


def is_loopback(host: str) -> bool:
    """Whether an address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
