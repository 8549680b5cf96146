"""An environment that holds verl beside this project's own torch and transformers."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from bench import ROOT

# What it takes to import verl's request and its transfer of weights, and no more: verl itself asks for a whole trainer.
PACKAGES = (
    *("verl==0.9.1", "tensordict==0.15.3", "ray==2.60.0", "torchvision==0.29.2", "pillow==13.0.0"),
    *("antlr4-python3-runtime==4.9.3", "attrs", "cloudpickle", "codetiming", "dill", "filelock"),
    *("importlib_metadata", "jsonschema", "jsonschema-specifications", "msgpack", "omegaconf"),
    *("orjson", "pandas", "protobuf", "psutil", "python-dateutil", "pyvers", "referencing"),
    *("rpds-py", "six", "pyzmq"),
)
INSTALL_SECONDS = 900


def environment() -> Path:
    """Return the Python of that environment, which the first call makes."""
    cache = Path(os.environ.get("ROLLOUT_CACHE", ROOT / ".cache"))
    home, uv = cache / "bench-verl", cache / "boot" / "bin" / "uv"
    python, done = home / "bin" / "python", home / ".installed"
    words = "\n".join(PACKAGES)
    if done.exists() and done.read_text() == words:
        return python
    subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, home], check=True)
    subprocess.run(
        [uv, "pip", "install", "-q", "--no-deps", "--python", python, *PACKAGES],
        env={**os.environ, "UV_CACHE_DIR": str(cache / "uv")},
        check=True,
        timeout=INSTALL_SECONDS,
    )
    # torch and transformers are this environment's own: found last, so that nothing is shadowed.
    site = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "zz_shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    done.write_text(words)
    return python
