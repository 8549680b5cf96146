"""A long conversation kept by `RolloutRequest`, by verl's request, and by verl's token builder.

Every way runs in a process of its own (`contenders.py`), in one environment that holds verl 0.9.1
beside this project's torch and transformers, with the same tokenizer, template and turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path

from .results import Figure, Options, Result

SUMMARY = "1,024 turns, and 256 with pictures, against verl's request and its token builder"
ROOT = Path(__file__).resolve().parents[1]
# What importing verl's request needs, and no more: verl itself asks for a whole trainer.
PACKAGES = (
    *("verl==0.9.1", "tensordict==0.15.3", "ray==2.60.0", "torchvision==0.29.2", "pillow==13.0.0"),
    *("antlr4-python3-runtime==4.9.3", "attrs", "cloudpickle", "codetiming", "dill", "filelock"),
    *("importlib_metadata", "jsonschema", "jsonschema-specifications", "msgpack", "omegaconf"),
    *("orjson", "pandas", "protobuf", "psutil", "python-dateutil", "pyvers", "referencing"),
    *("rpds-py", "six"),
)
PATIENCE = 1800
PIXELS = 16 * (224 // 14) * (308 // 14) * (2 * 3 * 14 * 14) * 4
"""Bytes of 16 pictures: patches of 14 x 14 in three colours, taken twice, as float32."""

Measured = dict[str, float]


def run(options: Options) -> Result:
    python, turns = environment(), options.count(1024, 128)
    looks, checked, compared = turns // 4, 17, 9
    runs = 1 if options.quick else 3
    mine = _median([_measure(python, "ours", turns, "TEXT") for _ in range(runs)])
    request = _measure(python, "verl-request", turns, "TEXT")
    builder = _measure(python, "verl-builder", turns, "TEXT")
    bare = _median([_measure(python, "libraries", turns, "TEXT") for _ in range(runs)])
    seen = _median([_measure(python, "ours", looks, "MEDIA") for _ in range(runs)])
    floor = _median([_measure(python, "libraries", looks, "MEDIA") for _ in range(runs)])
    their_seen = _measure(python, "verl-request", looks, "MEDIA")
    sane = _median([_measure(python, "ours", checked, "SANITY") for _ in range(runs)])
    short = _median([_measure(python, "ours", compared, "SANITY") for _ in range(runs)])
    their_short = _measure(python, "verl-request", compared, "SANITY")
    what = f"{turns:,} turns, {mine['tokens'] / 1000:.0f}k tokens"
    images = f"{looks} turns with 16 pictures, {seen['tokens'] / 1000:.0f}k tokens"
    return Result(
        "conversation",
        "Multi-turn conversations",
        [
            _against(f"{what}: in all", "total", "s", mine, request, 20),
            _floor(f"{what}: in all", "total", "s", mine, bare),
            _against(f"{what}: in all", "total", "s", mine, builder, 1, "verl's token builder"),
            _flat(f"{what}: a turn of the last tenth over one of the first", mine, request),
            _against(f"{what}: memory", "memory", "MiB", mine, request, 3),
            _against(f"{what}: memory", "memory", "MiB", mine, builder, 1, "verl's token builder"),
            _against(f"{images}: in all", "total", "s", seen, their_seen, 20),
            _floor(f"{images}: in all", "total", "s", seen, floor),
            _flat(f"{images}: a turn of the last tenth over one of the first", seen, their_seen),
            _against(f"{images}: memory", "memory", "MiB", seen, their_seen, 3),
            _floor(f"{images}: memory", "memory", "MiB", seen, floor),
            Figure(
                f"{images}: memory", "MiB", seen["memory"], baseline=PIXELS / 2**20,
                against="the pixels' bytes",
            ),
            Figure(
                f"sanity check of {sane['tokens'] / 1000:.1f}k tokens", "s", sane["end"],
                goal=(0.1, None),
            ),
            _against(
                f"sanity check of {short['tokens'] / 1000:.1f}k tokens", "end", "s", short,
                their_short, 1,
            ),
        ],
        [
            "Times are CPU times of one process each, a turn being: the ids for the engine, an answer "
            "of 241 sampled ids, a tool's result of 240 words. Ours also keeps logprobs and weights.",
            "Memory is the largest resident size above that of the prepared turns.",
            "verl's request got its sanity check switched off except in the last row; it grows with "
            "the square of the text. Its template was given plain dicts and its processor's "
            "`mm_token_type_ids` were taken away: with them it fails.",
            "The libraries alone: a process that tokenizes every result once and lets transformers make "
            "the pictures' pixels, which it keeps, as both requests must. A goal below their time, or "
            "below the pixels' bytes, is out of anybody's reach.",
        ],
    )  # fmt: skip


def _against(
    label: str, key: str, unit: str, mine: Measured, theirs: Measured, times: float,
    name: str = "verl's request",
) -> Figure:  # fmt: skip
    goal = (theirs[key] / times, None)
    return Figure(label, unit, mine[key], baseline=theirs[key], against=name, goal=goal)


def _floor(label: str, key: str, unit: str, mine: Measured, floor: Measured) -> Figure:
    name = "the libraries alone"
    return Figure(label, unit, mine[key], baseline=floor[key], against=name)


def _flat(label: str, mine: Measured, theirs: Measured) -> Figure:
    ratio, other = (found["last"] / found["first"] for found in (mine, theirs))
    return Figure(label, "x", ratio, baseline=other, against="verl's request", goal=(1.2, None))


def _median(found: list[Measured]) -> Measured:
    return {key: statistics.median(one[key] for one in found) for key in found[0]}


def _measure(python: Path, way: str, turns: int, kind: str) -> Measured:
    """Run one way to its end and return what it measured of itself."""
    print(f"  {way}, {turns} turns, {kind.lower()} …", flush=True)
    done = subprocess.run(
        [python, "-m", "bench.contenders", way, str(turns), kind],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE,
        env={
            **os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false", "VERL_LOGGING_LEVEL": "ERROR",
        },
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{way} failed:\n{done.stderr[-2000:]}")
    measured: Measured = json.loads(done.stdout.splitlines()[-1])
    return measured


def environment() -> Path:
    """Return the Python of the environment with verl, made on first use."""
    cache = Path(os.environ.get("ROLLOUT_CACHE", ROOT / ".cache"))
    home, uv = cache / "bench-verl", cache / "boot" / "bin" / "uv"
    python, done = home / "bin" / "python", home / ".installed"
    words = "\n".join(PACKAGES)
    if done.exists() and done.read_text() == words:
        return python
    more = {**os.environ, "UV_CACHE_DIR": str(cache / "uv")}
    subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, home], check=True)
    install: list[str | Path] = [
        uv,
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--python",
        python,
        *PACKAGES,
    ]
    subprocess.run(install, check=True, env=more, timeout=900)
    # torch and transformers are this environment's own: found last, so that nothing is shadowed.
    site = home / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (site / "zz_shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    done.write_text(words)
    return python
