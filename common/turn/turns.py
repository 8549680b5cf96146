"""`Turn`: the locks of several devices, all or none, locked in the order of their names."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import chain
from pathlib import Path
from typing import Self

from rollout_common.turn.errors import TurnError, TurnReplaced, TurnTimeout
from rollout_common.turn.lock_files import LockFile, lock_name, read_note

from .settings import HOLDER_POLL_SECONDS, OPEN_GRACE_SECONDS

ReportHolder = Callable[[Mapping[str, str]], None]
"""Gets the device that is waited for and its holder."""


class _Attempt:
    """One caller's wait for the turn: `done` ends with it, `locked` are its devices so far."""

    def __init__(self, timeout: float | None, report: ReportHolder | None) -> None:
        self.done: Future[None] = Future()
        self.locked: list[str] = []
        self._timeout = timeout
        self._report = report
        self._reported: Mapping[str, str] = {}
        self._start = time.monotonic()
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy of a forked child: if it unlocked, its parent would lose the locks."""
        return self._pid != os.getpid()

    def poll_seconds(self) -> float:
        """Return how long to wait until the next `poll`."""
        if self._timeout is None:
            return HOLDER_POLL_SECONDS
        left = self._timeout - (time.monotonic() - self._start)
        return max(0.001, min(HOLDER_POLL_SECONDS, left))

    def poll(self, blocked_by: Mapping[str, str]) -> None:
        """Report the holder if it has changed; raise `TurnTimeout` if the time is up."""
        if blocked_by and blocked_by != self._reported:
            self._reported = blocked_by
            if self._report is not None:
                self._report(blocked_by)
        if self._timeout is None:
            return
        # If nobody holds the turn, its files are being opened, which takes a moment.
        grace = 0.0 if blocked_by else OPEN_GRACE_SECONDS
        if time.monotonic() - self._start >= self._timeout + grace:
            raise TurnTimeout(self._timeout, blocked_by)


class Turn:
    """The right to hold memory of some devices, shared by every process that has the open lock files.

    It may be taken and given back any number of times, always on the same open files: a process that shares
    them holds the turn whenever this object does, and keeps it if this process is killed. All methods may be
    called from any thread.
    """

    def __init__(self, directory: Path, devices: Sequence[str], holder: str) -> None:
        """Remember the arguments; `take` opens the files.

        Args:
            directory: of the node's lock files.
            devices: such as `gpu.nvidia.com/node-1/gpu-0`, in any order.
            holder: the name that other waiters read.

        Raises:
            TurnError: no device, a device that is named twice, or one that can't name a file.
        """
        if not devices or len(set(devices)) != len(devices):
            raise TurnError(f"name at least one device, and each once, instead of {list(devices)}")
        for device in devices:
            lock_name(device)
        self._directory = directory
        self._devices = tuple(sorted(devices))
        self.holder = holder
        """The name that other waiters read, from the next `take` on."""
        self._guard = threading.Lock()
        self._files: dict[str, LockFile] = {}
        self._left_by: Mapping[str, str] = {}
        self._shared = self._lent = self._left = False
        self._attempt: _Attempt | None = None
        self._held: _Attempt | None = None
        self._thread: threading.Thread | None = None
        self._blocked_at: str | None = None

    @classmethod
    def adopt(cls, directory: Path, files: Mapping[str, tuple[int, int]], holder: str) -> Self:
        """Return the turn that other processes have, and share with this one from now on.

        It is for one use: after `give` it isn't taken again, only closed by `leave`.

        Args:
            directory: Of the node's lock files.
            files: By device: its holder's `LockFile.filenos`; they belong to the result, also after an error.
            holder: The name that waiters read after `write_notes`.

        Raises:
            TurnError: These are not the lock files of these devices, or their turn is somebody else's.
        """
        try:
            found = cls(directory, tuple(files), holder)
            for device in found._devices:
                found._files[device] = LockFile.adopt(directory, device, files[device])
        except TurnError:
            for each in chain.from_iterable(files.values()):
                with contextlib.suppress(OSError):  # one that is closed is why it was refused
                    os.close(each)
            raise
        found._held = _Attempt(None, None)
        return found

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices, in the order in which they are locked."""
        return self._devices

    @property
    def held(self) -> bool:
        """Whether this object has the turn for all its devices."""
        return self._held is not None

    @property
    def blocked_by(self) -> Mapping[str, str]:
        """The device that this object waits for now, and its holder; empty if it doesn't wait."""
        device = self._blocked_at if self._attempt is not None else None
        return {} if device is None else {device: read_note(self._directory, device)}

    @property
    def left_by(self) -> Mapping[str, str]:
        """The devices that a holder before this turn did not give back, and its name: that holder died.

        Its processes have ended, but the driver may still be returning their memory. Anybody who may write in the
        directory can forge this, so it is a reason to check the free memory and nothing more.
        """
        return self._left_by

    def take(self, timeout: float | None = None, waiting: ReportHolder | None = None) -> None:
        """Wait until this object has the turn for every device; return at once if it does.

        Args:
            timeout: in seconds; None: no limit; 0: only a turn that is free now.
            waiting: gets the device that is waited for and its holder, whenever that changes.

        Raises:
            TurnTimeout: others kept the turn; nothing is held.
            TurnError: the locks can't be used, or another thread waits with this object.
        """
        attempt = self._begin(timeout, waiting)
        if attempt is None:
            return
        try:
            while not wait([attempt.done], attempt.poll_seconds()).done:
                attempt.poll(self.blocked_by)
            attempt.done.result()
        except BaseException:
            self._abandon(attempt)
            raise

    async def take_async(
        self,
        timeout: float | None = None,
        waiting: ReportHolder | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """As `take`, for an event loop; a caller that is cancelled holds nothing afterwards.

        Returns:
            Whether this object has the turn; False only once `wanted`, which is polled, returned False.

        Raises:
            TurnTimeout: others kept the turn; nothing is held.
            TurnError: the locks can't be used, or another task waits with this object.
        """
        attempt = self._begin(timeout, waiting)
        if attempt is None:
            return True
        try:
            done = asyncio.wrap_future(attempt.done)
            while wanted():
                if (await asyncio.wait({done}, timeout=attempt.poll_seconds()))[0]:
                    done.result()
                    return True
                attempt.poll(self.blocked_by)
        except BaseException:
            self._abandon(attempt)
            raise
        self._abandon(attempt)
        return False

    def give(self) -> None:
        """Give the turn back for every process that shares it; do nothing if it isn't held.

        A turn that was lent is left instead: those who borrowed it still use the devices. A forked child gives nothing back: the turn is its parent's, and the child shares it until it has ended.
        """
        held = self._held
        if held is None or held.is_forked:
            return
        if self._lent:
            self.leave()
            return
        with self._guard:
            if self._held is held:
                self._give()

    def check_lendable(self) -> None:
        """Raise `TurnError` unless this process may lend the turn."""
        if self._held is None or self._held.is_forked:
            raise TurnError("only the process that holds a turn can lend it")

    def lend_files(self) -> dict[str, tuple[int, int]]:
        """Return what another process needs to `adopt` this turn; it is left, not given, from now on.

        Raises:
            TurnError: The turn isn't held.
        """
        self.check_lendable()
        files = self.fileno_list()
        self._lent = True
        pairs = zip(files[::2], files[1::2], strict=True)
        return dict(zip(self._devices, pairs, strict=True))

    def replaced_files(self) -> list[str]:
        """Return the held devices whose lock files others can't find any more."""
        with self._guard:
            held = self._devices if self._held is not None else ()
            return [device for device in held if not self._files[device].is_current()]

    def write_notes(self, holder: str) -> None:
        """Name the holder in the lock files that are held, as when the former holder of an adopted turn has left it."""
        for device in self._devices:
            self._files[device].write_note(holder)

    @property
    def is_locking(self) -> bool:
        """Whether a thread of this process waits for a lock, perhaps for an attempt that was given up."""
        return self._thread is not None and self._thread.is_alive()

    def end_loan(self) -> None:
        """Note that nobody shares the lent turn any more, so that `give` unlocks it again."""
        self._lent = False

    @property
    def is_waited_for(self) -> bool:
        """Whether another process waits for one of the locks that are held here."""
        with self._guard:
            held = self._devices if self._held is not None else ()
            return any(self._files[device].is_waited_for() for device in held)

    def fileno_list(self) -> list[int]:
        """Return the descriptors that make another process hold the turn, too: lock files and keepers.

        Raises:
            TurnError: the turn was never taken, so nothing is open.
        """
        with self._guard:
            if len(self._files) < len(self._devices) or self._left:
                raise TurnError("take the turn before you share it: no lock file is open yet")
            self._shared = True
            return [file for device in self._devices for file in self._files[device].filenos]

    def leave(self) -> None:
        """Close the files without unlocking: processes that share them keep the turn until they have ended.

        For a holder whose children should have ended but may not have. The next turn opens the files again, and
        must be shared again.
        """
        with self._guard:
            self._held = None
            self._left = True
            if self._thread is None or not self._thread.is_alive():
                self._close_left()  # otherwise the thread does it: it may be waiting in one of the files

    def _begin(self, timeout: float | None, report: ReportHolder | None) -> _Attempt | None:
        with self._guard:
            if self._held is not None:
                return None
            if self._attempt is not None:
                raise TurnError("this turn is waited for already: use one object for each waiter")
            # One thread serves all attempts in turn: a wait in the kernel can't be interrupted.
            # After a fork the child has no such thread.
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._work, name="turn", daemon=True)
                thread.start()
                self._thread = thread
            self._attempt = _Attempt(timeout, report)
            return self._attempt

    def _abandon(self, attempt: _Attempt) -> None:
        """Give back at once what an attempt has, even if it succeeded a moment ago."""
        if attempt.is_forked:
            return
        with self._guard:
            if self._attempt is attempt:
                self._attempt = None
                self._unlock(attempt.locked)
            elif self._held is attempt:
                self._give()

    def _work(self) -> None:
        while True:
            with self._guard:
                self._close_left()
                attempt = self._attempt
                if attempt is None:
                    self._thread = None
                    return
            try:
                self._lock_all(attempt)
            except BaseException as error:  # noqa: BLE001  # raised again in the waiting caller
                self._fail(attempt, error)

    def _fail(self, attempt: _Attempt, error: BaseException) -> None:
        with self._guard:
            if self._attempt is not attempt:
                return
            self._attempt = None
            self._unlock(attempt.locked)
            attempt.locked = []
        attempt.done.set_exception(error)

    def _lock_all(self, attempt: _Attempt) -> None:
        for device in self._devices:
            if not self._lock_one(attempt, device):
                return
        with self._guard:
            if self._attempt is not attempt:
                return
            self._attempt = None
            self._held = attempt
            left = ((device, self._files[device].noted_holder()) for device in self._devices)
            self._left_by = {device: name for device, name in left if name is not None}
            self.write_notes(self.holder)
        attempt.done.set_result(None)

    def _lock_one(self, attempt: _Attempt, device: str) -> bool:
        """Wait for one lock; return False if the attempt was abandoned."""

        def note_wait() -> None:
            self._blocked_at = device

        while True:
            if device not in self._files:
                self._files[device] = LockFile(self._directory, device)
            file = self._files[device]
            try:
                file.lock(note_wait)
            except OSError as error:
                raise TurnError(
                    f"can't lock {device} in {str(self._directory)!r} ({error.strerror}): mount a directory of "
                    f"the node's own disk there"
                ) from error
            finally:
                self._blocked_at = None
            with self._guard:
                if self._attempt is not attempt:
                    file.unlock()
                    return False
                if file.is_current():
                    attempt.locked.append(device)
                    return True
            self._drop_replaced(device)

    def _drop_replaced(self, device: str) -> None:
        """Close a lock file that was replaced during the wait, unless other processes share it."""
        self._files[device].unlock()
        if self._shared:
            raise TurnReplaced(
                f"the lock file of {device} in {str(self._directory)!r} was replaced while processes share "
                f"the old one: end them (restart the engine), and find out who removes files there"
            )
        self._files.pop(device).close()

    def _close_left(self) -> None:
        if self._left:
            self._left = self._shared = self._lent = False
            while self._files:
                self._files.popitem()[1].close()

    def _give(self) -> None:
        self._held = None
        # Before unlocking: afterwards the note is the next holder's.
        self.write_notes("")
        self._unlock(self._devices)

    def _unlock(self, devices: Sequence[str]) -> None:
        for device in devices:
            self._files[device].unlock()
