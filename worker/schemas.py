"""The public names of the wire models: what trainers and tests import.

`rollout_common.wire` defines them, for the worker's OpenAPI, the client and the operator. The names of
`rollout_client.conversation`, such as `RolloutRequest`, can be imported from here, too. They are loaded on
first use, because the worker must run without the trainer's library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rollout_common import wire
from rollout_common.wire import *  # noqa: F403

if TYPE_CHECKING:
    from rollout_client.conversation import *  # noqa: F403

CLIENT_NAMES = (
    *("Difference", "FinishReason", "OverlongPrompt", "PromptTooLong", "RequestState"),
    *("RolloutBatch", "RolloutRequest", "SanityCheckMode", "TemplateError", "ToolResponse"),
    *("from_batch", "to_batch"),
)
__all__ = [*CLIENT_NAMES, *wire.PUBLIC_NAMES]


def __getattr__(name: str) -> Any:
    """Load a name of `rollout_client.conversation`, which imports this module.

    Raises:
        ImportError: The packages that the client needs are not installed.
    """
    if name not in CLIENT_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module("rollout_client.conversation"), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} is a part of the client, which needs {error.name!r}: "
            "run pip install '.[client]' in a checkout of Rollout"
        ) from error
