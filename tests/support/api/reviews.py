"""An API server's two reviews on loopback: who calls, and yes. For workers that need two callers.

The real API server is asked in `tests/api/test_worker_auth_kubernetes.py`.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Reviews(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status: dict[str, Any] = {"allowed": True}
        if review["kind"] == "TokenReview":
            spec = review["spec"]
            user = {"username": spec["token"]}
            status = {"authenticated": True, "audiences": spec["audiences"], "user": user}
        body = json.dumps({**review, "status": status}).encode()
        self.send_response(201)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def reviews() -> Iterator[str]:
    """The URL of a server that takes every token for the name of its bearer."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Reviews)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
