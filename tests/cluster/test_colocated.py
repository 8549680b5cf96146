"""A trainer and a worker take turns on the same devices of a node, whatever happens to either.

The devices exist on paper, everything else is real: claims, scheduler, kubelet, driver, locks, engine. A judge
below the node looks each millisecond who has memory (hack/demo/judge.py, looks.py). The tests tell one story, in order.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

import rollout_local
from demo.judge import Judge
from demo.scene import SHAPE
from localkube import Cluster, fakedevices
from localkube.home import cache
from tests.support.api.apiclient import ApiError
from tests.support.cluster.pools import Pool
from tests.support.cluster.sharing import (
    CLAIMS,
    DEVICES,
    LABELS,
    Sharing,
    claim_template,
    named_claim,
    surroundings,
    trainer,
)

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.timeout(600)

NAMESPACE = "colocated"
FROZEN_SECONDS = 3.0
"""Long enough that somebody else would have gone ahead, short enough that nobody is replaced."""


@pytest.fixture(scope="module")
def sharing(cluster: Cluster) -> Iterator[Sharing]:
    """The judge looks, and the trainer's surroundings are there."""
    # Weights that show in a worker's memory.
    folder = cache() / "models" / NAMESPACE
    rollout_local.make_model(folder / "models" / "tiny", *SHAPE, "--seed", "1")
    (folder / "weights").mkdir(exist_ok=True)
    rollout_local.claims(cluster, NAMESPACE, folder)
    with Judge(cluster.state) as judge:
        made = Sharing(cluster, NAMESPACE, judge)
        made.apply(*surroundings(NAMESPACE))
        yield made


@pytest.fixture(scope="module")
def pool(sharing: Sharing) -> Iterator[Pool]:
    """The pool, applied before there is a trainer."""
    made = Pool(sharing.cluster, NAMESPACE, "shared")
    made.apply(mode="Colocated", colocation={"trainerSelector": {"matchLabels": LABELS}})
    yield made
    sharing.cluster.kubectl(
        "-n", NAMESPACE, "delete", "statefulset", "trainer", "--ignore-not-found"
    )
    made.delete()


def beside(sharing: Sharing, pool: Pool) -> None:
    """The rollout pod uses the trainer's claim, so its node and its devices."""
    ours, theirs = pool.pod(), sharing.trainer_pod()
    assert sharing.claim_of(ours) == sharing.claim_of(theirs)
    assert ours["spec"]["nodeName"] == theirs["spec"]["nodeName"]
    env = {e["name"]: e.get("value") for e in ours["spec"]["containers"][0]["env"]}
    node = theirs["spec"]["nodeName"]
    names = [f"{fakedevices.DRIVER}/{node}/gpu-{i}" for i in range(DEVICES)]
    assert env["ROLLOUT_TURN_DEVICES"] == ",".join(names)


def follows(sharing: Sharing, pool: Pool) -> bool:
    """Whether the rollout pod that is there was made for the claim of the trainer that is there, and has its node."""
    with suppress(ApiError, KeyError):  # a pod, its claim, its node or all are not there yet
        ours, theirs = pool.pod(), sharing.trainer_pod()
        claim = f"{CLAIMS.format(NAMESPACE)}/{sharing.claim_of(theirs)}"
        made_for = ours["metadata"]["annotations"]["rollout.dev/claim-uid"]
        is_bound = ours["spec"]["nodeName"] == theirs["spec"]["nodeName"]
        return is_bound and bool(made_for == sharing.api.get(claim)["metadata"]["uid"])
    return False


def test_the_pool_waits_for_its_trainer(pool: Pool) -> None:
    wanted = ("True", "TooFewTrainers")
    pool.eventually("it says for whom", lambda: pool.condition("Degraded") == wanted)
    assert not pool.pods()


def test_they_take_turns_from_the_first_moment(sharing: Sharing, pool: Pool) -> None:
    sharing.apply(named_claim("gpus"), trainer(pool.name, {"resourceClaimName": "gpus"}))
    pool.wait("Ready")
    beside(sharing, pool)
    # What a worker has asleep, the judge learns from one that sleeps.
    pool.eventually("it sleeps", lambda: pool.status()["phase"] == "Asleep", 60)
    sharing.idle_mib = sharing.judge.asleep_mib()
    assert sharing.idle_mib, "asleep it has less memory than awake"
    sharing.until_had_by(pool.pod()["metadata"]["uid"])
    sharing.both_have_turns()


def test_a_trainer_that_is_killed_in_its_turn_gives_way(sharing: Sharing, pool: Pool) -> None:
    sharing.until_had_by(sharing.trainer_pod()["metadata"]["uid"])
    os.kill(sharing.trainer_pid(), signal.SIGKILL)
    sharing.both_have_turns()


def test_a_worker_that_stands_still_keeps_its_turn(sharing: Sharing, pool: Pool) -> None:
    sharing.until_had_by(pool.pod()["metadata"]["uid"])
    with pool.frozen():
        before = sharing.report().turns
        time.sleep(FROZEN_SECONDS)
        assert sharing.report().turns == before, "nobody else had memory meanwhile"
    sharing.both_have_turns()


def test_a_worker_that_is_killed_in_its_turn_gives_way(sharing: Sharing, pool: Pool) -> None:
    before = pool.pod()["metadata"]["uid"]
    sharing.until_had_by(before)
    pool.kill()
    pool.eventually(
        "another pod is there",
        lambda: {pod["metadata"]["uid"] for pod in pool.pods()} - {before},
        60,
    )
    sharing.both_have_turns()


def test_a_worker_that_is_killed_asleep_waits_for_the_holder_that_stands_still(
    sharing: Sharing, pool: Pool
) -> None:
    """It loads nothing beside the trainer, and status names who is waited for."""
    holder = sharing.trainer_pod()["metadata"]
    sharing.until_had_by(holder["uid"])
    with sharing.frozen_trainer():
        pool.eventually("it sleeps", lambda: sharing.having() == {holder["uid"]}, 10)
        pool.kill()

        node = sharing.trainer_pod()["spec"]["nodeName"]
        device = f"{fakedevices.DRIVER}/{node}/gpu-0"
        whom = f"is Loading: waiting for the turn: {device} is held by {holder['name']}"

        def told() -> list[tuple[str, str]]:
            return [(m.get("turn", ""), m.get("message", "")) for m in pool.status()["members"]]

        pool.eventually(whom, lambda: told() == [("Waiting", whom)], 90)
        assert sharing.having() == {holder["uid"]}
    sharing.both_have_turns()


def test_an_api_server_that_stands_still_decides_nothing(sharing: Sharing, pool: Pool) -> None:
    """Nor does the operator, which hears nothing then."""
    with sharing.outage():
        time.sleep(FROZEN_SECONDS)
    sharing.both_have_turns()


def test_the_worker_follows_a_trainer_whose_claim_goes_with_it(
    sharing: Sharing, pool: Pool
) -> None:
    kubectl = ("-n", NAMESPACE, "delete", "--timeout=60s", "--cascade=foreground")
    sharing.cluster.kubectl(*kubectl, "statefulset/trainer")
    template = {"resourceClaimTemplateName": "gpus"}
    sharing.apply(claim_template("gpus"), trainer(pool.name, template))
    pool.eventually("a worker beside the new trainer", lambda: follows(sharing, pool), 90)
    beside(sharing, pool)


def test_the_judge_saw_no_overlap(sharing: Sharing) -> None:
    report = sharing.report()
    logger.info("%s", "\n".join(report.lines()))
    assert report.overlap == dict.fromkeys(report.overlap, 0.0)
    assert len(report.overlap) >= DEVICES
    assert len(report.pods) >= 4, "trainers and workers, each replaced at least once"
