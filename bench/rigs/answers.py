"""A program: a port that answers every generate request and every question for a worker's state at once, without an engine.

`python answers.py TOKENS` takes a free port, prints its number, and serves until it is ended.
"""

from __future__ import annotations

import asyncio
import json
import sys

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PER_EVENT = 8


def stream(tokens: int) -> bytes:
    events: list[tuple[str, dict[str, object]]] = []
    for start in range(0, tokens, PER_EVENT):
        end = min(tokens, start + PER_EVENT)
        span = {"epoch": 0, "version": 0, "start": start, "end": end, "stale_kv": False}
        delta: dict[str, object] = {
            "index": 0,
            "token_ids": list(range(start, end)),
            "logprobs": [-0.123456789] * (end - start),
            "weights": [span],
        }
        events.append(("delta", delta))
    done: dict[str, object] = {
        "request_id": "r",
        "logprobs_of": "sampling",
        "outputs": [{"index": 0, "stop_reason": "length"}],
        "usage": {"prompt_tokens": 512, "completion_tokens": tokens},
        "timing": {"queued_seconds": 0.0, "total_seconds": 0.0},
    }
    events.append(("done", done))
    parts = [f"event: {n}\ndata: {json.dumps(d)}\n\n".encode() for n, d in events]
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    return b"".join(chunks) + b"0\r\n\r\n"


def worker_state() -> bytes:
    active = {"epoch": 0, "version": 0, "root_hash": "checkpoint"}
    body = json.dumps(
        {
            "boot_id": "b", "engine": "hf", "lifecycle": "Active", "serving": True, "caller": "operator",
            "weights": {"active": active}, "resident": {"weights": True, "kv_cache": True},
        }
    )  # fmt: skip
    head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(body)}\r\n\r\n{body}".encode()


async def main(tokens: int) -> None:
    answer, state = HEAD + stream(tokens), worker_state()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        await reader.readexactly(int(line[15:]))
                writer.write(state if head.startswith(b"GET ") else answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
    async with server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
