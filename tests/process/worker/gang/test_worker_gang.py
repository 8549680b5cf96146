"""Replicas of several nodes: all vote or nothing changes, and who is lost takes the gang along."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from rollout_common.wire.gang_models import SlotRequest
from rollout_worker.engine import GangMembership
from rollout_worker.gang import gang_head as heads
from rollout_worker.gang import member_worker as members
from rollout_worker.gang import silence_timer
from rollout_worker.gang.gang_addresses import member_addresses as addresses
from rollout_worker.gang.member_client import MemberClient, MemberSilent
from rollout_worker.gang.silence_timer import SilenceTimer
from rollout_worker.schemas import Lifecycle, StagedWeights, StageSource, WeightsId
from rollout_worker.threads import run_in_thread
from tests.support.loopback import Loopback, loopback
from tests.support.unit.digests import whole_root_hash
from tests.support.unit.tiny_gang import (
    NODES,
    Node,
    TinyGang,
    head,
    node,
)
from tests.support.unit.tiny_worker import refused, settings
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("quick_gang")

CHECKPOINT = WeightsId(epoch=0, version=0)


@pytest.fixture
async def gang(tmp_path: Path, member: Node) -> AsyncIterator[TinyGang]:
    async with head(tmp_path, f"127.0.0.1:{member.port}") as gang:
        yield gang


def held(member: Node) -> list[tuple[str, str | None]]:
    """Phase and content of the member's slots."""
    return [(slot.phase, slot.root_hash) for slot in member.worker.gang_state().slots]


ODD = "content-mismatch"


async def never() -> None:
    """What waits for a rank that is gone."""
    await asyncio.Event().wait()


# Updates.


async def test_an_update_is_staged_on_every_node_and_committed_once(
    gang: TinyGang, member: Node
) -> None:
    staged = await gang.stage(1, 7)
    assert staged.phase == "Staged", staged.error
    assert held(member) == [("Filled", staged.root_hash)]
    (slot,) = member.worker.gang_state().slots
    assert (gang.slots / slot.id).is_symlink()
    assert (member.member.slots / slot.id).read_bytes()
    assert not (await gang.commit(1)).aborted
    assert gang.active == WeightsId(epoch=1, version=1)
    await until(lambda: not held(member), what="the member's memory")
    assert list(member.member.slots.iterdir()) == []


async def test_a_discarded_version_is_given_back_everywhere(gang: TinyGang, member: Node) -> None:
    assert (await gang.stage(1, 7)).phase == "Staged"
    await gang.updates.clear_slot()
    await until(lambda: not held(member), what="the member's memory")


async def test_the_next_version_waits_until_the_former_slot_is_gone(
    gang: TinyGang, member: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a node would hold three sets of weights."""
    assert (await gang.stage(1, 7)).phase == "Staged"
    await until(lambda: gang.runtime.gang.members[0].state.slots, what="the watch")  # type: ignore[union-attr]
    monkeypatch.setattr(heads, "MEMBER_POLL_SECONDS", 60.0)
    await asyncio.sleep(0.1)  # the watch is in its long rest now
    second = await gang.stage(2, 8)
    assert held(member) == [("Filled", second.root_hash)]


async def test_a_member_without_room_fails_the_stage_by_name(gang: TinyGang, member: Node) -> None:
    member.member.room = False
    staged = await gang.stage(1, 7)
    assert staged.phase == "Failed"
    assert str(staged.error).startswith(f"rank 1 at 127.0.0.1:{member.port} can't stage: no room")
    await until(lambda: not held(member), what="the member's slot")
    assert list(gang.slots.iterdir()) == []
    assert gang.active == CHECKPOINT
    member.member.room = True
    assert (await gang.stage(1, 7)).phase == "Staged", "and it goes on"


async def test_a_late_member_fails_the_stage_at_its_deadline(gang: TinyGang, member: Node) -> None:
    member.member.go.clear()
    staged = await gang.stage(1, 7, deadline_seconds=0.3)
    assert staged.phase == "Failed"
    assert "not staged within 0.3 s" in str(staged.error) or "did not stage" in str(staged.error)
    await until(lambda: not held(member), what="the member's slot")


async def test_a_head_that_fails_gives_the_members_slot_back(gang: TinyGang, member: Node) -> None:
    staged = await gang.stage(1, 7, root_hash="xxh3_128_tree:" + "0" * 32)
    assert (staged.phase, staged.slug) == ("Failed", ODD)
    await until(lambda: not held(member), what="the member's slot")


async def test_all_nodes_hash_in_the_scheme_of_the_root_hash_that_is_expected(
    gang: TinyGang,
) -> None:
    old = whole_root_hash({"number": ("U8", (1,), b"\7"), "rest": ("U8", (1,), b"\0")})
    staged = await gang.stage(1, 7, root_hash=old)
    assert (staged.phase, staged.root_hash) == ("Staged", old)


async def test_a_member_that_lost_its_slot_refuses_the_commit(gang: TinyGang, member: Node) -> None:
    assert (await gang.stage(1, 7)).phase == "Staged"
    (slot,) = member.worker.gang_state().slots
    await member.worker.slots.close(slot.id)
    with refused("engine-refused") as refusal:
        await gang.commit(1)
    assert f"rank 1 at 127.0.0.1:{member.port} has lost its slot" in str(refusal.value)
    assert gang.active == CHECKPOINT
    assert (await gang.update(1, 7)).active.version == 1, "staged again, it is committed"


async def test_what_sleep_keeps_is_filled_on_every_node(gang: TinyGang, member: Node) -> None:
    sink = await gang.updates.refill_active(on_disk=True)
    assert member.member.asked == [(sink.slot, True)]
    assert [phase for phase, _ in held(member)] == ["Filled"]
    sink.close()
    await until(lambda: not held(member), what="the member's file")


# A member that answers what it likes.


@pytest.fixture
async def liar() -> AsyncIterator[Loopback]:
    async with loopback() as server:
        yield server


def says(liar: Loopback, root_hash: str, **fields: Any) -> None:
    """Let it say this of itself."""
    state = {"boot_id": "a", "rank": 1, "phase": "Ready", "root_hash": root_hash, **fields}
    liar.answer("GET", "/v1/gang/state", state)


async def votes(liar: Loopback, gang: TinyGang, **vote: Any) -> StagedWeights:
    """Stage while it votes so; returns the slot, whose staging failed."""

    async def fill(request: Any) -> Any:
        return web.json_response({"id": request.path.rpartition("/")[2], **vote})

    class Every(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return super().get(key) or fill

    liar.answers = Every(liar.answers)
    staged = await gang.stage(1, 7)
    assert staged.phase == "Failed"
    return staged


@pytest.mark.parametrize(
    ("vote", "why", "slug"),
    [
        ({"phase": "Filled", "root_hash": "xxh3_128:other"}, "found root_hash xxh3_128:other", ODD),
        ({"phase": "Failed", "error": "other bytes", "slug": ODD}, "can't stage: other bytes", ODD),
        ({"phase": "Filled"}, "can't stage: None", None),
        ({"phase": "Failed", "error": "a broken disk"}, "can't stage: a broken disk", None),
        ({"phase": "Gone"}, "answered what no member does", None),
    ],
)
async def test_no_vote_but_the_same_content_stages(
    tmp_path: Path, liar: Loopback, root_hash: str, vote: dict[str, Any], why: str, slug: str | None
) -> None:
    says(liar, root_hash)
    async with head(tmp_path, liar.address) as gang:
        staged = await votes(liar, gang, **vote)
        assert why in str(staged.error)
        assert staged.slug == slug
        assert gang.active == CHECKPOINT


async def test_another_checkpoint_on_a_node_ends_the_start(tmp_path: Path, liar: Loopback) -> None:
    says(liar, "xxh3_128:other")
    async with head(tmp_path, liar.address) as gang:
        assert "has loaded another checkpoint (xxh3_128:other)" in await gang.why()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"boot_id": "b"}, "it was restarted"),
        ({"wrong": "one of vLLM's ranks died"}, "one of vLLM's ranks died"),
        ({"rank": 2}, "it says that it is rank 2"),
    ],
)
async def test_what_a_member_says_ends_the_gang(
    tmp_path: Path, liar: Loopback, root_hash: str, fields: dict[str, Any], why: str
) -> None:
    says(liar, root_hash)
    async with head(tmp_path, liar.address) as gang:
        says(liar, root_hash, **fields)
        assert await gang.why() == f"rank 1 at {liar.address}: {why}" or why in await gang.why()
        assert gang.engine.stopped


# Deaths.


async def test_a_silent_member_ends_the_gang(gang: TinyGang, member: Node) -> None:
    flight = await gang.runs("r")
    await member.silence()
    assert "rank 1 at 127.0.0.1" in await gang.why()
    assert "it has not answered for" in await gang.why()
    assert flight.done.is_set(), "nothing accepted is lost"
    assert gang.state is Lifecycle.FAILED


async def test_a_dead_rank_of_a_member_ends_both(gang: TinyGang, member: Node) -> None:
    member.member.wrong = "one of vLLM's ranks died"
    assert await member.why() == "one of vLLM's ranks died"
    assert f"rank 1 at 127.0.0.1:{member.port}: one of vLLM's ranks died" == await gang.why()


async def test_a_rank_that_can_not_start_tells_the_head_why(tmp_path: Path, root_hash: str) -> None:
    async with node(tmp_path, root_hash) as member:
        member.member.start_fails = "no such device"
        async with head(tmp_path, f"127.0.0.1:{member.port}", wait=False) as gang:
            gang.before_start["start"] = never
            assert "the ranks did not start: no such device" in await gang.why()
            assert "no such device" in await member.why()


async def test_a_member_whose_head_is_gone_ends_and_waits_for_nobody_to_hear_why(
    tmp_path: Path, member: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes counts among the seconds within which a node without its head ends."""
    monkeypatch.setattr(members, "FAILURE_REPORT_SECONDS", 60.0)
    async with head(tmp_path, f"127.0.0.1:{member.port}"):
        # From then on its silence counts at once.
        await until(lambda: member.worker._leader_started, what="the head's engine")
    assert "the head has not asked for" in await member.why()


async def test_a_volume_that_does_not_answer_keeps_no_rank_running(
    gang: TinyGang, member: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    async def hangs(*_: object, **__: object) -> None:
        await run_in_thread(lambda _: answers.wait(), threading.Event())

    monkeypatch.setattr(members, "SLOTS_CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(member.member, "open_slot", hangs)
    staging = asyncio.create_task(gang.stage(1, 7))
    try:
        await until(lambda: held(member) == [("Filling", None)], what="the member's slot")
        await asyncio.wait_for(member.worker.stop_worker(), 5)
        assert member.member.stopped
    finally:
        answers.set()
        staging.cancel()
        await asyncio.wait([staging])


async def test_a_member_told_to_end_stays_while_its_head_drains(
    tmp_path: Path, member: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "HEAD_LEAVE_SECONDS", 0.3)
    async with head(tmp_path, f"127.0.0.1:{member.port}"):
        await until(lambda: member.worker._leader_started, what="the head's engine")
        leaving = asyncio.create_task(member.worker.wait_released())
        await asyncio.sleep(0.5)
        assert not leaving.done()
    await asyncio.wait_for(leaving, 10)


async def test_a_member_knows_at_once_that_its_head_runs(
    tmp_path: Path, member: Node, root_hash: str
) -> None:
    """A head that dies right after its start is then missed within seconds, not within a minute."""
    at = f"127.0.0.1:{member.port}"
    flags = settings(*NODES, "--member-addresses", at)
    gang = GangMembership(nodes=2, rank=0, leader="127.0.0.1", port=8003, slots=tmp_path / "slots")
    head = heads.GangHead(flags, gang, "boot", lambda _: None)
    (watched,) = head.members
    await until(lambda: member.worker.is_ready, what="its ranks")
    watched.note_answer(await watched.line.get_state(started=False))
    await head.wait_agreed(root_hash)
    assert member.worker._leader_started
    await watched.line.close()


async def test_another_head_finds_no_member_of_the_former(
    tmp_path: Path, gang: TinyGang, member: Node
) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{member.port}") as other:
        answer = await other.get("/v1/gang/state", params={"leader": "another"})
    assert answer.status_code == 409
    assert await member.why() == "the head was restarted"
    assert "the head was restarted" in await gang.why()


async def test_nobody_is_given_up_before_it_was_met(tmp_path: Path, root_hash: str) -> None:
    async with node(tmp_path, root_hash) as member:
        await asyncio.sleep(0.7)  # more than either silence
        assert not member.running.done()
        async with head(tmp_path, f"127.0.0.1:{member.port}") as gang:
            assert gang.state is Lifecycle.ACTIVE


async def test_a_start_that_takes_too_long_names_who_is_missing(tmp_path: Path) -> None:
    flags = ("--start-timeout", "1")
    async with head(tmp_path, "127.0.0.1:9", *flags, wait=False) as gang:
        why = await gang.why()
    assert why.startswith(
        "the engine did not load within --start-timeout 1 s: rank 1 at 127.0.0.1:9"
    )


async def test_a_member_that_dies_in_a_commit_ends_the_gang_with_a_clear_answer(
    gang: TinyGang, member: Node
) -> None:
    assert (await gang.stage(1, 7)).phase == "Staged"
    gang.engine.before["commit"] = never  # as a collective step without a rank
    committing = asyncio.create_task(gang.commit(1))
    await until(lambda: gang.runtime.holds.committing is not None, what="the commit")
    member.member.wrong = "one of vLLM's ranks died"
    with refused("failed"):
        await committing
    assert "one of vLLM's ranks died" in await gang.why()


def test_a_stall_of_our_own_is_not_somebody_elses_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    quiet, most = SilenceTimer(lambda: now), 4.5
    monkeypatch.setattr(silence_timer, "MAX_GAP_SECONDS", most)
    now = 100.0
    assert quiet.silent_seconds() == most
    now += most / 2
    assert quiet.silent_seconds() == pytest.approx(most * 1.5)
    quiet.note_heard()
    assert quiet.silent_seconds() == 0


async def test_what_is_under_way_when_the_head_ends_gets_no_answer() -> None:
    line = MemberClient(1, "127.0.0.1:9", "a", settings())
    await line.close()
    with pytest.raises(MemberSilent, match="the head ends"):
        await line.close_slot("0" * 32)


async def test_a_line_that_is_closed_leaves_no_connection_whatever_a_call_was_about() -> None:
    """Also not one that was still being made, which httpx overlooks."""
    held: set[asyncio.StreamWriter] = set()
    came = 0

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        held.add(writer)
        await reader.read()
        held.discard(writer)
        writer.close()

    async with await asyncio.start_server(hold, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for steps in range(30):
            line = MemberClient(1, address, "a", settings())
            call = asyncio.create_task(line.get_state(started=False))
            for _ in range(steps):
                await asyncio.sleep(0)
            await line.close()
            with pytest.raises(MemberSilent, match="the head ends"):
                await call
        await until(lambda: not held, what="their end")
    assert came > 10


# The member's port.


async def test_a_member_answers_probes_and_nothing_else_of_a_worker(member: Node) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{member.port}") as caller:
        assert (await caller.get("/health")).status_code == 200
        await until(lambda: member.worker.is_ready, what="its ranks")
        assert (await caller.get("/ready")).status_code == 200
        for path in ("/v1/state", "/v1/generate", "/metrics"):
            answer = await caller.get(path)
            assert answer.status_code == 404
            assert "rank 1 of a gang of 2; ask its head at 127.0.0.1" in answer.json()["detail"]
        assert (await caller.get("/v1/gang/state")).status_code == 422, "whose call is it?"
        slot = await caller.get("/v1/gang/slots/" + "0" * 32, params={"leader": "a"})
        assert slot.status_code == 404


async def test_a_member_wants_the_token(tmp_path: Path, root_hash: str) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    flags = ("--auth", "token", "--auth-token-file", str(file))
    async with node(tmp_path, root_hash, *flags) as member:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{member.port}") as caller:
            assert (await caller.get("/health")).status_code == 200
            refusal = await caller.get("/v1/gang/state", params={"leader": "a"})
            assert refusal.status_code == 401
        async with head(tmp_path, f"127.0.0.1:{member.port}", *flags) as gang:
            assert (await gang.stage(1, 7)).phase == "Staged"


async def test_a_member_keeps_to_its_own_roots(tmp_path: Path, root_hash: str) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    async with (
        node(tmp_path, root_hash, "--weights-roots", str(allowed)) as member,
        head(tmp_path, f"127.0.0.1:{member.port}") as gang,
    ):
        staged = await gang.stage(1, 7)
    assert staged.phase == "Failed"
    assert "must lie below one of" in str(staged.error)


# Places.


def test_members_are_found_by_the_leaders_name() -> None:
    flags = ("--nodes", "3", "--leader-address", "pool-4-0.pool-heads", "--control-port", "8001")
    assert addresses(settings(*flags)) == ("pool-4-1.pool-heads:8001", "pool-4-2.pool-heads:8001")
    given = (*flags, "--member-addresses", "a:1,b:2")
    assert addresses(settings(*given)) == ("a:1", "b:2")


async def test_a_member_names_the_kind_of_its_failure(gang: TinyGang, member: Node) -> None:
    """The head goes by it, and the operator by the head's."""
    source = StageSource.model_validate({"checkpoint": {}})
    odd = SlotRequest(source=source, root_hash="xxh3_128_tree:" + "0" * 32, deadline_seconds=10)
    (gang.slots / ("0" * 32)).symlink_to("/dev/null")  # else the head has it given back
    member.worker.open_slot("0" * 32, odd)
    await until(lambda: [p for p, _ in held(member)] == ["Failed"], what="the member's answer")
    (slot,) = member.worker.gang_state().slots
    assert slot.slug == ODD
    assert "on this node" in str(slot.error)
