"""What a request for replay records must meet before it is queued."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_common.wire import Capabilities
from rollout_worker.engine import EngineRequest, InvalidRequest


def check_records(requests: Sequence[EngineRequest], able: Capabilities, engine: str) -> None:
    """Refuse records that the engine, or its model, does not have.

    Raises:
        InvalidRequest: Names the field, the engine and the fix.
    """
    request = requests[0]
    for field, asked, can in (
        ("return_routed_experts", request.routed_from is not None, able.return_routed_experts),
        ("return_sampling_mask", request.masks, able.return_sampling_mask),
    ):
        if asked and not can:
            what = "no experts of this model" if "experts" in field else "no masks"
            raise InvalidRequest(field, f"the {engine} engine records {what}: leave it out")
        if asked and request.sampling.max_tokens == 0:
            raise InvalidRequest(field, "max_tokens 0 samples nothing to replay: leave it out")
