"""The demo asks its own Prometheus, whatever proxy this machine has."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from demo.monitoring import query

SERIES = [{"metric": {"pod": "a"}, "value": [0, "1"]}]


class Prometheus(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = SERIES if self.path == "/api/v1/query?query=sum%28up%29" else []
        body = json.dumps({"data": {"result": found}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_a_query_does_not_go_to_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as deaf, HTTPServer(("127.0.0.1", 0), Prometheus) as server:
        deaf.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        monkeypatch.setenv("http_proxy", nowhere)
        monkeypatch.delenv("no_proxy", raising=False)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        assert query(f"http://127.0.0.1:{server.server_port}", "sum(up)") == SERIES
        assert query(nowhere, "sum(up)") == [], "it is not up yet"
        server.shutdown()
