"""The portal: coroutines for threads without a loop, and the work that they hand back to these threads."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import traceback
import weakref
from collections.abc import Iterator

import pytest

from rollout_client import PoolClosed
from rollout_client.blocking_portal import BlockingPortal, calling_thread
from rollout_client.steering.spool import run_to_end


@pytest.fixture
def portal() -> Iterator[BlockingPortal]:
    portal = BlockingPortal("portal")
    yield portal
    portal.close()


async def answer() -> int:
    await asyncio.sleep(0)
    return 42


def test_work_runs_in_the_thread_that_called(portal: BlockingPortal) -> None:
    async def work() -> list[threading.Thread]:
        here = await run_to_end(threading.current_thread)
        beside = await asyncio.create_task(run_to_end(threading.current_thread))
        return [here, beside, threading.current_thread()]

    here, beside, loop = portal.call(work())
    assert here is threading.current_thread()
    assert len({here, beside, loop}) == 3, "a task beside the call has no thread that waits for it"
    others: list[threading.Thread] = []
    other = threading.Thread(target=lambda: others.append(portal.call(work())[0]))
    other.start()
    other.join(10)
    assert others == [other]


async def test_without_a_call_there_is_no_such_thread() -> None:
    assert calling_thread() is None
    assert await run_to_end(threading.current_thread) is not threading.current_thread()


def test_work_may_call_the_portal(portal: BlockingPortal) -> None:
    async def work() -> int:
        return await run_to_end(portal.call, answer())

    assert portal.call(work()) == 42


def fail_in_work() -> None:
    raise LookupError("no such tensor")


def test_an_error_of_work_shows_where_it_came_from_and_is_not_kept(portal: BlockingPortal) -> None:
    class Kept:
        pass

    kept: list[weakref.ref[Kept]] = []

    def fail() -> None:
        tensor = Kept()
        kept.append(weakref.ref(tensor))
        fail_in_work()

    async def coroutine_that_hands_over() -> None:
        running = calling_thread()
        assert running is not None
        await asyncio.wrap_future(running.run_work(fail))

    gc.disable()
    try:
        try:
            portal.call(coroutine_that_hands_over())
        except LookupError as error:
            frames = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        assert {"fail_in_work", "coroutine_that_hands_over", "call"} <= frames
        portal.call(answer())  # the loop lets go of the task before
        assert [each() for each in kept] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_work_ends_the_call_and_nothing_else(
    portal: BlockingPortal, interrupt: type[BaseException]
) -> None:
    seen: list[object] = []

    def stop() -> None:
        raise interrupt("now")

    async def work() -> None:
        try:
            await run_to_end(stop)
        except BaseException as error:
            seen.append(type(error))
            seen.append(await run_to_end(threading.current_thread))
            raise

    with pytest.raises(interrupt, match="now"):
        portal.call(work())
    assert seen == [interrupt, threading.current_thread()]
    assert portal.call(answer()) == 42


def test_an_interrupt_cancels_the_call_and_waits_for_its_end(portal: BlockingPortal) -> None:
    seen: list[object] = []

    async def work() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.sleep(60)
        finally:
            seen.append(await run_to_end(threading.current_thread))

    with pytest.raises(KeyboardInterrupt):
        portal.call(work())
    assert seen == [threading.current_thread()]
    assert portal.call(answer()) == 42


def test_a_second_interrupt_does_not_wait(portal: BlockingPortal) -> None:
    may_end, ended = asyncio.Event(), threading.Event()

    async def end() -> None:
        may_end.set()

    async def work() -> None:
        def interrupt() -> None:
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(0.05, interrupt).start()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            threading.Timer(0.05, interrupt).start()
            await may_end.wait()
            with pytest.raises(asyncio.CancelledError):  # nobody is left to do it
                await run_to_end(fail_in_work)
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        portal.call(work())
    assert not ended.is_set()
    assert portal.call(answer()) == 42
    portal.call(end())
    assert ended.wait(10)


def test_a_closed_portal_refuses_calls_and_ends_those_under_way() -> None:
    portal = BlockingPortal("portal")
    errors: list[BaseException] = []
    waits = threading.Event()

    async def work() -> None:
        waits.set()
        await asyncio.sleep(60)

    def call() -> None:
        try:
            portal.call(work())
        except PoolClosed as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert waits.wait(10)
    portal.close()
    thread.join(10)
    assert [str(error) for error in errors] == ["the pool was closed while this ran"]
    with pytest.raises(PoolClosed, match="the pool was closed"):
        portal.call(answer())
    portal.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_at_once(portal: BlockingPortal) -> None:
    child = os.fork()
    if child == 0:
        try:
            portal.call(answer())
        except PoolClosed as error:
            os._exit(7 if "make a pool in each process" in str(error) else 8)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert portal.call(answer()) == 42
