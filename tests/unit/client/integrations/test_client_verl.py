"""What verl's client asks of a pool, seen by a pool that only listens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rollout_client.integrations.verl import VerlClient
from rollout_worker.schemas import WorkerInfo
from tests.support.unit.states import worker_info


class Listener:
    """Notes what it is asked; to a generation it has no answer."""

    def __init__(self) -> None:
        self.waited: list[float] = []
        self.options: list[dict[str, Any]] = []

    async def info(self, *, seconds: float = 30) -> WorkerInfo:
        """Note how long somebody would wait."""
        self.waited.append(seconds)
        return WorkerInfo.model_validate(worker_info())

    async def generate(self, prompt: list[int], **options: Any) -> None:
        """Note the options, and fail."""
        self.options.append(options)
        raise LookupError


@pytest.mark.parametrize(("deadline", "waits"), [(None, 7200), (900, 900)])
async def test_the_first_prompt_waits_for_replicas_as_long_as_any_other(
    deadline: float | None, waits: float
) -> None:
    """Right after a job begins they load their model: that takes minutes."""
    pool = Listener()
    client = VerlClient(lambda: pool, deadline_seconds=deadline)  # type: ignore[arg-type,return-value]
    with pytest.raises(LookupError):
        await client.generate("c", prompt_ids=[1], sampling_params={})
    assert pool.waited == [waits]


@pytest.mark.parametrize(
    ("configured", "asked", "sent"),
    [(True, {}, True), (False, {}, False), (True, {"ignore_eos": False}, False)],
)
async def test_the_end_of_an_answer_is_as_verl_is_configured(
    configured: bool, asked: dict[str, Any], sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Listener()
    monkeypatch.setattr("rollout_client.integrations.verl.PoolSettings.open", lambda self: pool)
    config = SimpleNamespace(
        custom={"pool": {"name": "math"}},
        prompt_length=8,
        response_length=8,
        seed=1,
        full_determinism=False,
        ignore_eos=configured,
    )
    with pytest.raises(LookupError):
        await VerlClient.of(config).generate("c", prompt_ids=[1], sampling_params=asked)
    assert pool.options[0]["sampling"]["ignore_eos"] is sent


def test_routes_that_a_pool_does_not_record_for_verl_are_refused() -> None:
    with pytest.raises(ValueError, match="enable_rollout_routing_replay is not supported"):
        VerlClient.of(SimpleNamespace(enable_rollout_routing_replay=True))
