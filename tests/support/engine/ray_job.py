"""A small Ray job over a pool, run by a Python that has Ray: `python ray_job.py URL…`; prints JSON."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import ray

from rollout_client import AsyncRolloutPool
from rollout_client.integrations.ray import pool_actor

MIB = 2**20
PROMPT = [5, 6, 7, 8]
SAMPLING = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def turns(handle: Any, session: str, count: int) -> list[tuple[list[int], str]]:
    """What a rollout process does: some turns of a conversation through the one pool."""
    found = []
    for _ in range(count):
        answer = handle.generate.remote(PROMPT, session_id=session, sampling=SAMPLING)
        result = ray.get(answer)
        found.append((list(result.token_ids), result.attempts[0].replica))
    return found


def main(urls: list[str]) -> None:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 * MIB)
    remote_turns = ray.remote(turns).options(num_cpus=0.1)
    make = partial(AsyncRolloutPool.from_urls, urls)
    handle = pool_actor(make, name="pool")
    again = pool_actor(make, name="pool")
    # One conversation from two processes, one after the other: the balancer knows it.
    first = ray.get(remote_turns.remote(handle, "c", 2))
    second = ray.get(remote_turns.remote(again, "c", 2))
    ray.get(handle.wait_serving.remote(2, seconds=60))
    crowd = ray.get(handle.generate_many.remote([PROMPT] * 8, sampling=SAMPLING))
    spread = sorted({result.attempts[0].replica for result in crowd})
    error = None
    try:
        ray.get(handle.generate.remote(PROMPT, sampling={"max_tokens": 10**6}))
    except Exception as caught:  # noqa: BLE001 - the test reads it
        error = (
            f"{type(caught.cause).__name__}: {caught.cause}"
            if hasattr(caught, "cause")
            else repr(caught)
        )
    load = ray.get(handle.load.remote())
    ray.get(handle.close.remote())
    said = {"first": first, "second": second, "spread": spread, "error": error, "load": load}
    sys.stdout.write(json.dumps(said) + "\n")
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
