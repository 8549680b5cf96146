"""Sizes as Kubernetes writes them: `80Gi`, `1.5G`, `2e9`, `1024`."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {
    "m": Decimal("0.001"),
    "": Decimal(1),
    **{unit: Decimal(1000) ** n for n, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** n for n, unit in enumerate("KMGTPE", 1)},
}
_QUANTITY = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)(?:([eE][+-]?[0-9]{1,2})|(\D{0,2}))")


def parse_quantity_bytes(text: str) -> int:
    """Return the bytes of a quantity, a fraction of one rounded up.

    Raises:
        ValueError: It is not a quantity, or not above 0.
    """
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or (found[3] or "") not in _UNITS:
        raise ValueError("must be a size such as 80Gi")
    value = Decimal(found[1] + (found[2] or "")) * _UNITS[found[3] or ""]
    if value <= 0:
        raise ValueError("must be more than 0")
    return int(value.to_integral_value("ROUND_CEILING"))
