"""Page-locked memory: whose context locks it, what undoes that, and what is said where it can't be."""

from __future__ import annotations

import threading

import pytest

from rollout_common.transfer.memory import page_locking as locked
from rollout_common.transfer.memory.page_locking import PORTABLE, lock_pages
from tests.support.unit.cuda_driver import Driver


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked, "_warned", set())


def in_thread(work: object) -> None:
    assert callable(work)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_pages_are_locked_until_they_go() -> None:
    driver = Driver()
    unlock = lock_pages(4096, 8192, driver=driver)
    assert driver.locked == {4096: 8192}
    assert driver.flags == {PORTABLE}
    assert unlock is not None
    unlock()
    assert driver.locked == {}


def test_pages_are_unlocked_by_a_thread_without_a_context() -> None:
    driver = Driver()
    unlock = lock_pages(4096, 8192, driver=driver)
    in_thread(unlock)
    assert driver.locked == {}
    assert list(driver.contexts.values()) == [[77], []]


def test_memory_that_cannot_be_locked_serves_unlocked(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(error=2)
    for _ in range(3):  # one version after the other
        assert lock_pages(4096, 8192, driver=driver) is None
    assert [record.message for record in caplog.records] == [
        "CUDA can't lock 8192 bytes of weights (error 2): they are copied more slowly; see the limit"
        " of locked memory"
    ]


def test_without_any_context_nothing_is_locked(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver()
    driver.contexts.clear()
    assert lock_pages(4096, 8192, driver=driver) is None
    assert driver.locked == {}
    assert "error 201" in caplog.text


def test_without_a_driver_nothing_is_locked_and_nothing_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locked, "find_driver", lambda: None)
    assert lock_pages(4096, 8192) is None
    assert caplog.records == []
