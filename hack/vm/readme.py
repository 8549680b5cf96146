#!/usr/bin/env python3
"""Follow README's way without a cluster by its words alone, on a machine that has nothing of ours but a clone.

    sudo python3 hack/vm/machine.py --bare python3 hack/vm/readme.py

Each line that README shows is run as it stands, but for the model: a small one is made, so that the Hugging Face Hub
need not be reached. Each step is printed with its time.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECTION = "## Without a cluster\n"
START_SECONDS = 300.0
"""Of `rollout up`. What it takes is printed: it should be less than a minute."""

MAKE_MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)).save_pretrained("small-model")
"""


def main() -> int:
    install, up, example = readme_blocks(Path("README.md").read_text())
    with step(install):
        run(install)
    with step("make a model"):
        run(f"python -c '{MAKE_MODEL}'")
    with step(up):
        generate_once(re.sub(r"--model \S+", "--model small-model", up))
    with step(example):
        run(example)
    return 0


def readme_blocks(text: str) -> list[str]:
    """Return the blocks of commands of README's section, without the comments behind them."""
    _, _, rest = text.partition(SECTION)
    blocks = re.findall(r"^```\n(.*?)^```", rest.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    return [re.sub(r"\s+# .*", "", block).strip() for block in blocks]


@contextmanager
def step(what: str) -> Iterator[None]:
    print(f"\n$ {what}", flush=True)
    began = time.monotonic()
    yield
    print(f"  done after {time.monotonic() - began:.0f} s", flush=True)


def shell(command: str) -> list[str]:
    """As the shell in which a reader of README types everything."""
    return ["bash", "-ec", f"[ ! -e .venv ] || . .venv/bin/activate\n{command}"]


def run(command: str) -> None:
    subprocess.run(shell(command), check=True)


def generate_once(command: str) -> None:
    """Start workers, run the program that they print, end them by Ctrl-C."""
    began = time.monotonic()
    workers = subprocess.Popen(shell(f"exec {command}"), stdout=subprocess.PIPE, text=True)
    late = threading.Timer(START_SECONDS, workers.kill)
    late.start()
    shown = ""
    for line in workers.stdout or ():
        print(line, end="", flush=True)
        shown += line
        if "Ctrl-C ends" in line:
            break
    late.cancel()
    if "Ctrl-C ends" not in shown:
        raise SystemExit(f"error: no workers within {START_SECONDS:.0f} s: status {workers.wait()}")
    program = shown.partition("In Python:")[2].partition("In a shell:")[0]
    found = subprocess.run(
        shell("exec python -"), input=program, text=True, check=True, stdout=subprocess.PIPE
    )
    print(f"{found.stdout}  first tokens after {time.monotonic() - began:.0f} s", flush=True)
    workers.send_signal(signal.SIGINT)
    if workers.wait(60) != 0:
        raise SystemExit(f"error: after Ctrl-C it ended with status {workers.returncode}")


if __name__ == "__main__":
    sys.exit(main())
