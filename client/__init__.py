"""The trainer's SDK: generate on a pool of rollout workers, publish weights to it, steer it.

`RolloutPool` is for ordinary programs, `AsyncRolloutPool` for asyncio. Neither torch nor Kubernetes
packages are imported. `worker_control` is the client of one worker's control port.
"""

from rollout_common.wire import GenerateRequest, SamplingParams, WeightsId

from .conversation import Conversation, RolloutRequest
from .discovery.pool_members import Member
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
    TurnFailed,
    VersionChanged,
)
from .hooks import Hook, PrometheusHook
from .pool import AsyncRolloutPool, RolloutPool
from .results import AttemptReport, GenerateResult, ScoreResult
from .steering.control_ports import DirectOptions
from .steering.pushing.push_tensors import whole_tensors
from .steering.steering_protocol import Published, PublishProgress, PublishReport, PushedTo

__all__ = [
    "AsyncRolloutPool",
    "AttemptReport",
    "ClusterError",
    "Conversation",
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
    "PublishReport",
    "Published",
    "PushedTo",
    "RequestError",
    "RequestFailed",
    "RequestRefused",
    "RolloutError",
    "RolloutPool",
    "RolloutRequest",
    "SamplingParams",
    "ScoreResult",
    "SteeringFailed",
    "Superseded",
    "TurnFailed",
    "VersionChanged",
    "WeightsId",
    "whole_tensors",
]
