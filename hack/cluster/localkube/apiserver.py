"""A minimal client of the API server, quicker than a kubectl process."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any


class ApiServer:
    """Requests as cluster-admin, over the standard library."""

    def __init__(self, address: str, port: int, pki: Path) -> None:
        self._address = address
        self._port = port
        self._tls = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._tls.load_cert_chain(pki / "admin.crt", pki / "admin.key")

    def request(
        self, path: str, method: str = "GET", body: object = None, content_type: str = ""
    ) -> tuple[int, Any]:
        """Return status and decoded body; status 0 while nobody answers."""
        connection = http.client.HTTPSConnection(
            self._address, self._port, context=self._tls, timeout=10
        )
        headers = {"Content-Type": content_type or "application/json"}
        data = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            text = response.read()
        except OSError:
            return 0, None
        finally:
            connection.close()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(text) if is_json else text.decode()

    def ok(self, path: str) -> bool:
        return self.request(path)[0] == 200

    def is_node_ready(self, name: str) -> bool:
        status, node = self.request(f"/api/v1/nodes/{name}")
        conditions = node["status"].get("conditions", []) if status == 200 else []
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
