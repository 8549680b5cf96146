"""Preload the memory saver's library into /bin/true: a scheduler that can't load it never starts."""

from __future__ import annotations

import os
import subprocess

from torch_memory_saver.utils import get_binary_path_from_package

from told import tell


def main() -> None:
    path = str(get_binary_path_from_package("torch_memory_saver_hook_mode_preload"))
    done = subprocess.run(
        ["/bin/true"],
        env={**os.environ, "LD_PRELOAD": path},
        capture_output=True,
        text=True,
        check=False,
    )
    tell({"library": path, "status": done.returncode, "said": done.stderr.strip()})


if __name__ == "__main__":
    main()
