"""Credentials from the program that a kubeconfig names, as kubectl gets them (`users[].user.exec`).

Clouds hand out short-lived tokens this way. The program runs before the first request, and when the last
token was refused or is about to expire; it has no terminal, so it can't ask anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from .errors import LoginFailed
from .settings import EXPIRY_MARGIN_SECONDS, PLUGIN_TIMEOUT_SECONDS, UNDATED_LIFETIME_SECONDS

MAX_STDERR_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class ExecCredential:
    """A token or a certificate with its key (PEM), to be used until a wall-clock time."""

    token: str | None
    certificate: str | None
    until: float


class ExecPlugin:
    """Runs the program of a user's section `exec`, and keeps its answer until shortly before it expires.

    `cluster` is for programs that want that section; `use_certificate` takes each new certificate with its key, as PEM.

    Raises:
        ValueError: The section names no program, or one that must ask somebody.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        cluster: Mapping[str, Any],
        use_certificate: Callable[[str], None],
    ) -> None:
        if not spec.get("command") or not spec.get("apiVersion"):
            raise ValueError("exec must name a command and its apiVersion")
        if spec.get("interactiveMode") == "Always":
            raise ValueError("exec with interactiveMode Always needs a terminal: use another user")
        self._command = str(spec["command"])
        self._spec = spec
        self._cluster = cluster
        self._use_certificate = use_certificate
        self._lock = threading.Lock()
        self._kept: ExecCredential | None = None
        self._failed: tuple[float, LoginFailed] | None = None

    def get_token(self) -> str | None:
        """Return the token for a request; blocks while the program runs, which is once for all who wait.

        Raises:
            LoginFailed: It can't be run, failed, or gave another answer.
        """
        asked = time.monotonic()
        with self._lock:
            if self._kept is None or time.time() >= self._kept.until:
                if self._failed is not None and self._failed[0] >= asked:
                    raise self._failed[1]
                self._kept = self._ask_program()
            return self._kept.token

    def forget_token(self, refused: str | None) -> bool:
        """Drop a token that the API server refused: the program runs before the next request."""
        kept = self._kept
        if kept is not None and kept.token == refused:
            self._kept = None
        return True

    def _ask_program(self) -> ExecCredential:
        try:
            found = self._parse_credential(self._run_program())
        except LoginFailed as error:
            self._failed = time.monotonic(), error
            raise
        if found.certificate is not None:
            self._use_certificate(found.certificate)
        return found

    def _run_program(self) -> str:
        info: dict[str, Any] = {"interactive": False}
        if self._spec.get("provideClusterInfo"):
            info["cluster"] = dict(self._cluster)
        asked = {"apiVersion": self._spec["apiVersion"], "kind": "ExecCredential", "spec": info}
        more = {str(each["name"]): str(each["value"]) for each in self._spec.get("env") or ()}
        try:
            done = subprocess.run(
                [self._command, *map(str, self._spec.get("args") or ())],
                env={**os.environ, **more, "KUBERNETES_EXEC_INFO": json.dumps(asked)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PLUGIN_TIMEOUT_SECONDS,
                check=False,
            )
        except FileNotFoundError:
            hint = self._spec.get("installHint") or "install it, or use another user"
            raise self._program_error(f"it does not exist: {hint}") from None
        except subprocess.TimeoutExpired as error:
            # Such as the page where it wants a person to log in.
            said = _last_words((error.stderr or b"").decode(errors="replace"))
            why = f"it did not end within {PLUGIN_TIMEOUT_SECONDS:g} s: {said}"
            raise self._program_error(why) from None
        except (OSError, ValueError) as error:
            raise self._program_error(str(error)) from error
        if done.returncode:
            raise self._program_error(
                f"it ended with {done.returncode}: {_last_words(done.stderr)}"
            )
        return done.stdout

    def _parse_credential(self, text: str) -> ExecCredential:
        try:
            answer = json.loads(text)
            status = answer["status"]
            pair = (status.get("clientCertificateData"), status.get("clientKeyData"))
            certificate = "\n".join(pair) if all(pair) else None
            if not status.get("token") and certificate is None:
                raise ValueError("neither a token nor a certificate with its key")
            end = status.get("expirationTimestamp")
            until = time.time() + UNDATED_LIFETIME_SECONDS
            if end:
                until = datetime.fromisoformat(end).timestamp() - EXPIRY_MARGIN_SECONDS
            return ExecCredential(status.get("token"), certificate, until)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._program_error(f"its answer is not an ExecCredential: {error!r}") from error

    def _program_error(self, why: str) -> LoginFailed:
        return LoginFailed(f"the kubeconfig's program {self._command}: {why}")


def _last_words(stderr: str) -> str:
    return stderr.strip()[-MAX_STDERR_CHARACTERS:] or "it said nothing"
