"""The proxy that the environment names for a server, as Go's programs read it: `HTTPS_PROXY`, `NO_PROXY`.

urllib and httpx know no networks (`10.0.0.0/8`) in `NO_PROXY`, and kubectl's users have them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit


def environment_proxy(server: str, environment: Mapping[str, str]) -> str | None:
    """Return the URL of the proxy for a server; None: the environment names none, or excludes the server."""
    url = urlsplit(server)
    proxy = _read_variable(environment, f"{url.scheme}_proxy")
    if not proxy or _is_excluded(url, _read_variable(environment, "no_proxy")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _read_variable(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name.upper()) or environment.get(name) or ""


def _is_excluded(url: SplitResult, no_proxy: str) -> bool:
    host = (url.hostname or "").rstrip(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    port = url.port or (443 if url.scheme == "https" else 80)
    entries = (each.strip().lower() for each in no_proxy.split(","))
    return any(_matches(each, host, address, port) for each in entries if each)


def _matches(
    entry: str, host: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address | None, port: int
) -> bool:
    if entry == "*":
        return True
    if "/" in entry:
        try:
            network = ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
        return address is not None and address in network
    name, colon, digits = entry.rpartition(":")
    if colon and digits.isdecimal() and (":" not in name or name.endswith("]")):
        if int(digits) != port:
            return False
        entry = name
    entry = entry.strip("[]").removeprefix("*")
    if address is not None:
        return entry == host
    return host.endswith(entry if entry.startswith(".") else f".{entry}") or host == entry
