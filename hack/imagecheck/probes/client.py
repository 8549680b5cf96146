"""Next to a starting worker: wait until it serves, generate, and end it."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

DATA = "http://127.0.0.1:8000"
SECONDS = 400.0
ANSWER = Path("/tmp/check/answer.json")


def call(path: str, body: object = None) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(DATA + path, data, headers), timeout=60
    ) as answer:
        text = answer.read()
    found: dict[str, object] = json.loads(text) if text[:1] == b"{" else {}
    return found


def main() -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            call("/ready")
            break
        except (OSError, urllib.error.URLError) as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"not ready within {SECONDS:.0f} s: {error}") from error
            time.sleep(0.5)
    body = {"token_ids": [5, 6, 7, 8], "sampling": {"max_tokens": 8, "temperature": 0}}
    ANSWER.write_text(json.dumps(call("/v1/generate", body)))
    os.kill(1, signal.SIGTERM)


if __name__ == "__main__":
    main()
