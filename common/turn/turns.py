"""`Turn`: the locks of several devices, all or none, from the first of their names to the last."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path

from rollout_common.turn import keeping, lock_files, lock_queue
from rollout_common.turn.errors import TurnError, TurnReplaced
from rollout_common.turn.looks import Look, Waiting


@dataclass(slots=True, eq=False)
class _Attempt:
    """One wish for the turn: `done` ends with it, `locked` are the devices that it has so far."""

    done: Future[None] = field(default_factory=Future)
    locked: list[str] = field(default_factory=list)
    pid: int = field(default_factory=os.getpid)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child, whose parent's it is: its unlocking would be the parent's, too."""
        return self.pid != os.getpid()


class Turn:
    """The right to hold memory of some devices, shared with every process that got the open files.

    It may be taken and given back any number of times, always on the same open files: a process that shares
    them holds the turn whenever this object does, and keeps it if this process is killed. All methods may be
    called from any thread.
    """

    def __init__(self, directory: Path, devices: Sequence[str], holder: str) -> None:
        """Only remember what is asked for: nothing is opened before the turn is taken.

        Args:
            directory: of the node's lock files.
            devices: such as `gpu.nvidia.com/node-1/gpu-0`; their order doesn't matter.
            holder: tells people who has the turn.

        Raises:
            TurnError: no device, one of them twice, or one that can't name a file.
        """
        if not devices or len(set(devices)) != len(devices):
            raise TurnError(f"name at least one device, and each once, instead of {list(devices)}")
        for device in devices:
            lock_files.lock_name(device)
        self._directory = directory
        self._devices = tuple(sorted(devices))
        self._holder = holder
        self._guard = threading.Lock()
        self._open: dict[str, int] = {}
        self._keepers: dict[str, int] = {}
        self._left_by: Mapping[str, str] = {}
        self._shared = False
        self._left = False
        self._attempt: _Attempt | None = None
        self._held: _Attempt | None = None
        self._thread: threading.Thread | None = None
        self._blocked_at: str | None = None

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
        """The device that this object waits for now, and who holds it; nothing if it doesn't wait."""
        device = self._blocked_at if self._attempt is not None else None
        return {} if device is None else {device: lock_files.read_note(self._directory, device)}

    @property
    def left_by(self) -> Mapping[str, str]:
        """The devices that were not given back before this turn, and who had them: that one died.

        Its processes have ended, but a driver may still be taking back their memory. Whoever may write in the directory
        may have written this: it is a reason to look, and no more.
        """
        return self._left_by

    def take(self, timeout: float | None = None, waiting: Waiting | None = None) -> None:
        """Wait until every device is ours; does nothing if they are.

        Args:
            timeout: so many seconds, without end if it is None; 0 asks for a turn that is free now.
            waiting: is told the device that it waits for and its holder, whenever that changes.

        Raises:
            TurnTimeout: others kept it; nothing is held.
            TurnError: the locks can't be used, or another thread waits with this object.
        """
        attempt = self._begin()
        if attempt is None:
            return
        look = Look(lambda: self.blocked_by, timeout, waiting)
        try:
            while not wait([attempt.done], look.seconds()).done:
                look()
            return attempt.done.result()
        except BaseException:
            self._abandon(attempt)
            raise

    async def take_async(
        self, timeout: float | None = None, waiting: Waiting | None = None
    ) -> None:
        """As `take`, for an event loop; whoever is cancelled holds nothing afterwards.

        Raises:
            TurnTimeout: others kept it; nothing is held.
            TurnError: the locks can't be used, or another task waits with this object.
        """
        attempt = self._begin()
        if attempt is None:
            return
        look = Look(lambda: self.blocked_by, timeout, waiting)
        try:
            done = asyncio.wrap_future(attempt.done)
            while not (await asyncio.wait({done}, timeout=look.seconds()))[0]:
                look()
            return done.result()
        except BaseException:
            self._abandon(attempt)
            raise

    def give(self) -> None:
        """Give the turn back for every process that shares it; does nothing if it isn't held.

        A forked child gives nothing back: the turn is its parent's, and the child shares it until it has ended.
        """
        held = self._held
        if held is None or held.forked:
            return
        with self._guard:
            if self._held is held:
                self._held = None
                self._give()

    def replaced_files(self) -> list[str]:
        """Return those of the devices that this object has whose lock files others don't find any more."""
        with self._guard:
            held = self._devices if self._held is not None else ()
            return [
                each
                for each in held
                if not lock_files.is_current(self._open[each], self._directory, each)
            ]

    def fileno_list(self) -> list[int]:
        """Return what processes need that shall hold the turn, too (`pass_fds`): the open lock files, and their keepers.

        Raises:
            TurnError: the turn was never taken, so nothing is open.
        """
        with self._guard:
            if len(self._open) < len(self._devices) or self._left:
                raise TurnError("take the turn before you share it: no lock file is open yet")
            self._shared = True
            return [
                each[device] for each in (self._open, self._keepers) for device in self._devices
            ]

    def leave(self) -> None:
        """Let go without giving back: who joined keeps the turn until they have ended, too.

        For a holder whose children should have ended but can't be trusted to. The next turn opens the files
        anew, and is shared anew.
        """
        with self._guard:
            self._held = None
            self._left = True
            if self._thread is None or not self._thread.is_alive():
                self._close_left()  # else the thread does it, which may stand in one of the files

    def _begin(self) -> _Attempt | None:
        with self._guard:
            if self._held is not None:
                return None
            if self._attempt is not None:
                raise TurnError(
                    "this turn is waited for already: use one object for each who waits"
                )
            # One thread, however often somebody gives up: it goes on with the newest attempt. (After a
            # fork the child's copy of it is no more.)
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._work, name="turn", daemon=True)
                thread.start()
                self._thread = thread
            self._attempt = _Attempt()
            return self._attempt

    def _abandon(self, attempt: _Attempt) -> None:
        """Give back at once what the attempt has, even if it ended well a moment ago."""
        if attempt.forked:
            return
        with self._guard:
            if self._attempt is attempt:
                self._attempt = None
                self._unlock(attempt.locked)
            elif self._held is attempt:
                self._held = None
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
            except BaseException as error:  # noqa: BLE001  # who waits gets it, whatever it is
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
            left = {device: lock_files.noted(self._open[device]) for device in self._devices}
            self._left_by = {device: who for device, who in left.items() if who is not None}
            for device in self._devices:
                lock_files.write_note(self._open[device], self._holder)
        attempt.done.set_result(None)

    def _lock_one(self, attempt: _Attempt, device: str) -> bool:
        """Wait for one lock; False if nobody wants it any more."""
        while True:
            file = self._opened(device)
            self._flock(file, device)
            with self._guard:
                if self._attempt is not attempt:
                    fcntl.flock(file, fcntl.LOCK_UN)
                    return False
                if lock_files.is_current(file, self._directory, device):
                    attempt.locked.append(device)
                    return True
            self._drop(device)

    def _opened(self, device: str) -> int:
        if device not in self._open:
            opened = keeping.open_kept(self._directory, device)
            self._open[device], self._keepers[device] = opened
        return self._open[device]

    def _flock(self, file: int, device: str) -> None:
        try:
            if not lock_queue.try_enter(file):
                self._blocked_at = device
                lock_queue.enter(file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._blocked_at = device
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise TurnError(
                f"can't lock {device} in {str(self._directory)!r} ({error.strerror}): mount a directory of "
                f"the node's own disk there"
            ) from error
        finally:
            self._blocked_at = None
            lock_queue.leave(file)

    def _drop(self, device: str) -> None:
        """Somebody replaced the file that we waited for: close it, unless others hold it through us."""
        fcntl.flock(self._open[device], fcntl.LOCK_UN)
        if self._shared:
            raise TurnReplaced(
                f"the lock file of {device} in {str(self._directory)!r} was replaced while processes share "
                f"the old one: end them (restart the engine), and find out who removes files there"
            )
        self._close(device)

    def _close_left(self) -> None:
        if self._left:
            self._left = self._shared = False
            for device in list(self._open):
                self._close(device)

    def _close(self, device: str) -> None:
        os.close(self._open.pop(device))
        os.close(self._keepers.pop(device))

    def _give(self) -> None:
        """Unlock all, the notes first: afterwards they would be the next holder's."""
        for device in self._devices:
            lock_files.write_note(self._open[device], "")
        self._unlock(self._devices)

    def _unlock(self, devices: Sequence[str]) -> None:
        for device in devices:
            fcntl.flock(self._open[device], fcntl.LOCK_UN)
