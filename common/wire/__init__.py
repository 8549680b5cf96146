"""The models that cross a process boundary, and every problem a worker can answer with.

Every model is frozen and refuses unknown fields. Times are in seconds, ids are token ids of the served
model's tokenizer, and weights are identified by `WeightsId` (epoch, version), ordered lexicographically.
Nothing here imports torch or a web framework. Code outside of this project imports the same names from
`rollout_worker.schemas`.
"""

from __future__ import annotations

from . import (
    adapters,
    control_models,
    generate,
    rich_requests,
    weights_models,
    wire_base,
    worker_info,
)
from .adapters import *  # noqa: F403
from .control_models import *  # noqa: F403
from .generate import *  # noqa: F403
from .rich_requests import *  # noqa: F403
from .weights_models import *  # noqa: F403
from .wire_base import *  # noqa: F403
from .worker_info import *  # noqa: F403

PUBLIC_NAMES = (
    *adapters.__all__,
    *control_models.__all__,
    *generate.__all__,
    *rich_requests.__all__,
    *weights_models.__all__,
    *wire_base.__all__,
    *worker_info.__all__,
)
