"""What a simulated worker's control port answers."""

from __future__ import annotations

import json

from pydantic import BaseModel

from rollout_worker.schemas import (
    CommitRequest,
    CommitResponse,
    DiscardRequest,
    DiscardResponse,
    OfferRequest,
    OfferResponse,
    RequireRequest,
    StageRequest,
    WakeRequest,
)
from tests.support.unit.simworker import SimWorker


def answer_call(worker: SimWorker, verb: str, body: bytes) -> tuple[int, bytes]:
    """Let a worker do a call; returns code and body of its answer."""
    given = json.loads(body or b"{}").get("generation")
    if given is not None and given < (worker.generation or 0):
        return _refuse("stale-generation")
    worker.generation = given or worker.generation
    found = _do_call(worker, verb, body or b"{}")
    return _refuse(found) if isinstance(found, str) else (200, found.model_dump_json().encode())


def _refuse(problem: str) -> tuple[int, bytes]:
    slug, _, detail = problem.partition(":")
    return 409, json.dumps({"type": f"urn:rollout:problem:{slug}", "detail": detail}).encode()


def _do_call(worker: SimWorker, verb: str, body: bytes) -> BaseModel | str:
    """Return the answer, or the problem."""
    match verb:
        case "require":
            worker.require(RequireRequest.model_validate_json(body))
            return worker.state().weights
        case "stage":
            problem = worker.stage(StageRequest.model_validate_json(body))
            return problem or worker.staged or "gone"
        case "commit":
            return worker.commit(CommitRequest.model_validate_json(body)) or _committed(worker)
        case "discard":
            worker.discard(DiscardRequest.model_validate_json(body))
            return DiscardResponse(outcome="discarded")
        case "offer":
            asked, kept = OfferRequest.model_validate_json(body), worker.kept
            if kept is None or (kept.epoch, kept.version) != (asked.epoch, asked.version):
                return "not-kept"
            return OfferResponse(
                ticket="0" * 32, port=1, layout_id="l", bytes=kept.bytes, root_hash=kept.root_hash
            )
        case "wake":
            problem = worker.wake(WakeRequest.model_validate_json(body))
            return problem or worker.state()
    if verb != "state":
        {"sleep": worker.sleep, "pause": worker.pause, "resume": worker.resume}[verb]()
    return worker.state()


def _committed(worker: SimWorker) -> CommitResponse:
    active = worker.state().weights.active
    assert active is not None
    return CommitResponse(
        active=active,
        previous=None,
        commit_seq=1,
        pause_seconds=0.1,
        finished=0,
        aborted=0,
        kept=0,
    )
