"""Who and where we are: process, user, what can be written, which packages are installed."""

from __future__ import annotations

import csv
import getpass
import os
import re
import sys
import tempfile
from importlib.metadata import distributions

from told import tell

FOLDERS = ("/", "/opt/rollout", "/usr/local", "/tmp", "/dev/shm")


def writable(folder: str) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def shared_files() -> list[list[str]]:
    """Return files that several packages install with different contents: the last one won."""
    owners: dict[str, dict[str, str]] = {}
    for each in distributions():
        name = each.metadata["Name"]
        for file, digest, *_ in csv.reader((each.read_text("RECORD") or "").splitlines()):
            if digest:
                owners.setdefault(file, {})[name] = digest
    return [
        [file, *sorted(hashes)]
        for file, hashes in sorted(owners.items())
        if len(set(hashes.values())) > 1
    ]


def user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def main() -> None:
    names = {
        re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(): each.version
        for each in distributions()
    }
    with open("/opt/rollout/requirements.txt") as file:
        requirements = file.read()
    tell(
        {
            "pid": os.getpid(),
            "user": [os.getuid(), os.getgid(), os.getgroups()],
            "user_name": user_name(),
            "writable": [folder for folder in FOLDERS if writable(folder)],
            "python": sys.version.split()[0],
            "installed": names,
            "shared_files": shared_files(),
            "requirements": requirements,
        }
    )


if __name__ == "__main__":
    main()
