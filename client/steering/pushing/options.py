"""The options of a publish of tensors, checked."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, TypedDict

from rollout_client.errors import PublishFailed
from rollout_client.option_names import check_option_names
from rollout_client.steering.version_folder import DEFAULT_KEPT_VERSIONS, VersionFolder
from rollout_common.transfer.nixl.agent_handle import NIXL_FIX, find_nixl

from .routes import TRANSPORTS, Transport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from rollout_client.steering.spool import Tensors
    from rollout_client.steering.steering_protocol import OnProgress

MAX_PORT = 65535


class PushOptions(TypedDict, total=False):
    """Options of `publish_weights(tensors=…)`.

    Attributes:
        transport: `auto` (default): shared memory to replicas of this machine whose socket this process
            sees, TCP to all others. `shm` or `tcp`: that way alone. `nixl`: over TCP, but replicas read the bytes
            by NIXL, with RDMA where there is any.
        rate: Most bytes a second that go out over TCP, to all replicas together; None: no limit.
        spool: Folder to write the version to as well, as `save_and_publish` does, before it is
            committed. It is then the pool's durable source for replicas that join when no other has the bytes any more.
        mounted_at: The path of the same folder in the workers: absolute, or relative to the weights' claim;
            None: the same path as here.
        keep: How many committed versions stay in the folder, at least the one that serves.
        ranks: The torch.distributed process group whose ranks have parts of the tensors: all of them call
            this with the same arguments, and all get the same answer. Each passes its model or state
            dict. Rank 0 of the group publishes; each rank writes its own shards into memory of its node, and the
            replicas fetch from all nodes.
        ranks_host: Name or address by which ranks of other nodes reach rank 0; None: all addresses of its
            node are tried.
        ranks_ports: First and last port of the range from which rank 0 takes one for them; None: any port.
        cast: Whether floating-point tensors are cast to the dtype of the model's checkpoint, one at a time: for
            trainers that keep them in another dtype, such as float32. False (default): a tensor of another
            dtype is refused.
        base: `auto` (default): over TCP, replicas that serve the previous version get deltas from it, where
            that is less work; this process keeps its bytes. None: every replica gets all bytes.
    """

    transport: Transport
    rate: float | None
    base: Literal["auto"] | None
    cast: bool
    spool: str | PurePath | None
    mounted_at: str | PurePath | None
    keep: int
    ranks: ProcessGroup | None
    ranks_host: str | None
    ranks_ports: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """How other nodes reach rank 0.

    Attributes:
        host: Its name or address for them; None: they try all of its addresses.
        ports: First and last port of the range from which it takes one; None: any port.
    """

    host: str | None = None
    ports: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PushPlan:
    """The checked options of a publish, each as `PushOptions` describes it.

    Attributes:
        versions: Writes the folders; None: no folder is written.
        delta: Whether deltas from the previous version may be sent instead of all bytes.
        reach: How ranks of other nodes reach rank 0.
    """

    transport: Transport = "auto"
    versions: VersionFolder | None = None
    ranks: ProcessGroup | None = None
    rate: float | None = None
    delta: bool = False
    reach: ListenAddress = ListenAddress()
    cast: bool = False

    @classmethod
    def of(cls, path: str | PurePath | EllipsisType | None, options: Mapping[str, Any]) -> PushPlan:
        """Return the options of a publish of tensors.

        Raises:
            TypeError: A path is given, too, an option needs a folder or ranks that are missing, or an option
                does not exist.
            PublishFailed: NIXL is wanted, but not installed.
            ValueError: A transport, base, host or port is not valid, or the rate is too small to send anything.
        """
        if path is not ...:
            raise TypeError(
                "give publish_weights a path, tensors or adapters, and only one of them"
            )
        _check_names(options)
        transport = options.get("transport", "auto")
        if transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, not {transport!r}")
        if transport == "nixl" and find_nixl() is None:
            raise PublishFailed(f"this trainer has no NIXL: {NIXL_FIX}")
        rate: float | None = options.get("rate")
        if rate is not None and not (isinstance(rate, SupportsFloat) and float(rate) > 0):
            raise ValueError(f"rate must be a number of bytes a second above 0, not {rate!r}")
        base = options.get("base", "auto")
        if base not in ("auto", None):
            raise ValueError(f"base must be 'auto' or None, not {base!r}")
        spool, ranks = options.get("spool"), options.get("ranks")
        cast = options.get("cast", False)
        if not isinstance(cast, bool):
            raise ValueError(f"cast must be True or False, not {cast!r}")
        reach, versions = _reach_of(options, ranks), None
        if spool is not None:
            keep = options.get("keep", DEFAULT_KEPT_VERSIONS)
            versions = VersionFolder(spool, options.get("mounted_at"), keep)
        elif options.keys() & {"mounted_at", "keep"}:
            raise TypeError("mounted_at and keep are about the folder of spool: give spool, too")
        return cls(transport, versions, ranks, rate, base is not None, reach, cast)


@dataclass(frozen=True, slots=True)
class PushWork:
    """One publish of tensors; only the tensors differ between the ranks of a group.

    Attributes:
        tensors: What this process has of the version.
        seconds: How long it may take.
    """

    version: int
    tensors: Tensors
    plan: PushPlan
    seconds: float
    progress: OnProgress = lambda progress: None


def _check_names(options: Mapping[str, Any]) -> None:
    known = (*PushOptions.__annotations__, "path", "tensors", "adapters", "seconds", "progress")
    check_option_names("publish_weights", options, known)


def _reach_of(options: Mapping[str, Any], ranks: object) -> ListenAddress:
    host, ports = options.get("ranks_host"), options.get("ranks_ports")
    if ranks is None and (host, ports) != (None, None):
        raise TypeError("ranks_host and ranks_ports are about several ranks: give ranks, too")
    if host is not None and not _is_host(host):
        raise ValueError(
            f"ranks_host must be a name or an address alone, such as 'trainer-0.trainer' or '10.0.0.7',"
            f" not {host!r}; the port is of ranks_ports"
        )
    if ports is not None:
        if not _are_ports(ports):
            raise ValueError(
                f"ranks_ports must be a first and a last port of 1 to {MAX_PORT}, such as"
                f" (29600, 29615), not {ports!r}"
            )
        ports = tuple(ports)
    return ListenAddress(host, ports)


def _is_host(host: object) -> bool:
    """Whether it is a valid host name or address, without a port or brackets."""
    if not isinstance(host, str):
        return False
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    try:
        return bool(host.encode("idna")) and not re.search(r"[\s:/\[\]\0]", host)
    except UnicodeError:
        return False


def _are_ports(ports: object) -> bool:
    if not isinstance(ports, list | tuple) or [type(each) for each in ports] != [int, int]:
        return False
    first, last = ports
    return bool(1 <= first <= last <= MAX_PORT)


def check_path(path: object, options: Mapping[str, Any]) -> None:
    """Refuse a publish without a source, and options that apply to tensors only.

    Raises:
        TypeError: The source is missing, or an option applies to tensors only.
    """
    if path is ...:
        raise TypeError("give publish_weights a path, tensors= or adapters=")
    _check_names(options)
    if options:
        raise TypeError(f"{', '.join(sorted(options))}: only a publish of tensors takes this")
