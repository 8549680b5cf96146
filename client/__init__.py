"""The trainer's SDK: generate on a pool of rollout workers, publish weights to it, steer it.

`RolloutPool` for ordinary programs, `AsyncRolloutPool` for asyncio. Neither torch nor Kubernetes
packages are imported. `control` is the control port of one worker.
"""

from rollout_worker.schemas import GenerateRequest, RolloutRequest, SamplingParams, WeightsId

from .direct import DirectOptions
from .errors import (
    ClusterError,
    DeadlineExceeded,
    EpochLost,
    ManyFailed,
    NoReplica,
    PoolClosed,
    PublishError,
    PublishFailed,
    RequestError,
    RequestFailed,
    RequestRefused,
    RolloutError,
    SteeringFailed,
    Superseded,
    VersionChanged,
)
from .hooks import Hook, PrometheusHook
from .members import Member
from .pool import AsyncRolloutPool
from .results import AttemptReport, GenerateResult
from .steering import Published, PublishProgress
from .sync import RolloutPool

__all__ = [
    "AsyncRolloutPool",
    "AttemptReport",
    "ClusterError",
    "DeadlineExceeded",
    "DirectOptions",
    "EpochLost",
    "GenerateRequest",
    "GenerateResult",
    "Hook",
    "ManyFailed",
    "Member",
    "NoReplica",
    "PoolClosed",
    "PrometheusHook",
    "PublishError",
    "PublishFailed",
    "PublishProgress",
    "Published",
    "RequestError",
    "RequestFailed",
    "RequestRefused",
    "RolloutError",
    "RolloutPool",
    "RolloutRequest",
    "SamplingParams",
    "SteeringFailed",
    "Superseded",
    "VersionChanged",
    "WeightsId",
]
