"""Record which experts a model's routers choose while it runs.

The routers of transformers' mixtures of experts are modules that return (logits, weights, indices), the last one of
integers [tokens, top_k], in the order of the tokens of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

ROUTER_SUFFIX = "router"
"""Where the names of their classes end, in lower case."""


class RouterRecorder:
    """The routers of one model. `layers`: how many route, `top_k`: to how many experts each."""

    def __init__(self, routers: list[Any]) -> None:
        self.layers = len(routers)
        self.top_k = int(routers[0].top_k)
        experts = max(int(router.num_experts) for router in routers)
        self.dtype: Literal["uint8", "uint16"] = "uint8" if experts <= 256 else "uint16"
        self.row_bytes = self.layers * self.top_k * (1 if self.dtype == "uint8" else 2)
        self._chosen: list[Tensor] | None = None
        for router in routers:
            router.register_forward_hook(self._note_choice)

    def _note_choice(self, _: Any, __: Any, found: tuple[Tensor, ...]) -> None:
        if self._chosen is not None:
            self._chosen.append(found[-1])

    @contextmanager
    def record_pass(self) -> Iterator[list[Tensor]]:
        """Record one pass: the list has the choices of each layer [N, top_k] after it."""
        chosen: list[Tensor] = []
        self._chosen = chosen
        try:
            yield chosen
        finally:
            self._chosen = None

    def collect_routes(self, chosen: list[Tensor]) -> bytes:
        """Return what a pass recorded: [N, layers, top_k] in `dtype`."""
        kind = torch.uint8 if self.dtype == "uint8" else torch.uint16
        routes = torch.stack(chosen, dim=1).to(kind).cpu().contiguous()
        return bytes(routes.numpy().tobytes())


def find_routers(model: Any) -> RouterRecorder | None:
    """Return the recorder of a model's routers; None if it has none, or of a kind whose choices are not known."""
    routers = [
        module
        for module in model.modules()
        if type(module).__name__.lower().endswith(ROUTER_SUFFIX)
    ]
    if not routers or len({getattr(router, "top_k", None) for router in routers}) != 1:
        return None
    return RouterRecorder(routers) if all(map(_returns_indices, routers)) else None


def _returns_indices(router: Any) -> bool:
    """Try a router on one token."""
    try:
        width = router.weight.shape[-1]
        token = torch.zeros(1, width, dtype=router.weight.dtype, device=router.weight.device)
        with torch.no_grad():
            found = router(token)
        chosen = found[-1]
        shape = (1, int(router.top_k))
        return chosen.shape == shape and not chosen.is_floating_point() and router.num_experts > 0
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return False
