"""A rank of a gang, as a process: `python gang_rank.py FOLDER RANK`. Memory is a lock that tells of an overlap.

It shares its worker's turn, has memory from its start on, and frees it or has it again when told to at
FOLDER/rank-RANK.sock: `free`, `have`. It ends with its worker.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_common.parent_death import die_with_parent
from rollout_common.turn.sharing import join


def take_memory(folder: Path, rank: int) -> int:
    """Take memory of a node's device; closing the file frees it.

    Raises:
        BlockingIOError: somebody else has some, what must never be; it is noted, too.
    """
    file = os.open(folder / f"memory-{rank}", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with (folder / "overlaps").open("a") as overlaps:
            overlaps.write(f"node {rank}\n")
        os.close(file)
        raise
    return file


@contextmanager
def memory(folder: Path, rank: int) -> Iterator[None]:
    """Have memory of a device for a block; see `take_memory`."""
    file = take_memory(folder, rank)
    try:
        yield
    finally:
        os.close(file)


def main(folder: Path, rank: int, parent: int) -> None:
    """Be a rank."""
    die_with_parent(parent)
    join()
    file: int | None = take_memory(folder, rank)
    path = folder / f"rank-{rank}.sock"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        print("loaded", flush=True)  # noqa: T201
        while True:
            peer, _ = listening.accept()
            with peer:
                word = peer.recv(16)
                if word == b"free" and file is not None:
                    os.close(file)
                    file = None
                elif word == b"have" and file is None:
                    file = take_memory(folder, rank)
                peer.sendall(b"done")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
