"""Secrets out of what `collect` writes. Pure."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "REDACTED"

_SECRET_NAME = (
    r"(?:token|secret|passw|credential|api[-_]?key|access[-_]?key|private[-_]?key|authorization)"
)
_NAME = re.compile(_SECRET_NAME, re.IGNORECASE)
_TEXTS = (
    re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
    ),
    re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"),
    re.compile(r"(?<=Bearer )\s*[^\s\"',]+", re.IGNORECASE),
    re.compile(r"(?<=Basic )[A-Za-z0-9+/=]{8,}"),
    re.compile(r"\beyJ[\w-]+\.[\w-]+(?:\.[\w-]*)?"),
    re.compile(
        r"\bhf_[A-Za-z0-9]{10,}|\b(?:sk|ghp|gho|glpat|xox[a-z])[-_][\w-]{10,}|\bAKIA[A-Z0-9]{12,}"
    ),
)
_ASSIGNED = re.compile(rf"(?i)([\w-]*{_SECRET_NAME}[\w-]*[\"']?\s*[=:]\s*[\"']?)([^\s\"',&}}]+)")
_OPTION = re.compile(rf"(?i)(--[\w-]*{_SECRET_NAME}[\w-]*\s+)(\S+)")
_DROPPED = ("managedFields", "kubectl.kubernetes.io/last-applied-configuration")
_KINDS = {"secretKeyRef", "tokenSecret", "tls"}
"""Names that refer to a Secret hold none."""


def redact_text(text: str) -> str:
    """Return a text without what looks like a token, a password or a key."""
    for pattern in _TEXTS:
        text = pattern.sub(REDACTED, text)
    text = _OPTION.sub(rf"\1{REDACTED}", text)
    return _ASSIGNED.sub(rf"\1{REDACTED}", text)


def redact_object(value: Any) -> Any:
    """Return JSON without secrets: values of variables and arguments, and all texts."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, list):
        return _redact_list(value)
    if not isinstance(value, dict):
        return value
    if "value" in value and "name" in value and _NAME.search(str(value["name"])):
        return {**value, "value": REDACTED}
    return {key: _redact_field(key, each) for key, each in value.items() if key not in _DROPPED}


def _redact_field(key: str, value: Any) -> Any:
    hidden = isinstance(value, str) and key not in _KINDS and _NAME.search(key)
    return REDACTED if hidden else redact_object(value)


def _redact_list(values: list[Any]) -> list[Any]:
    """Redact a list; after an argument such as `--api-key` the next one is the secret."""
    found, hide = [], False
    for each in values:
        found.append(REDACTED if hide and isinstance(each, str) else redact_object(each))
        hide = (
            isinstance(each, str)
            and each[:1] == "-"
            and "=" not in each
            and bool(_NAME.search(each))
        )
    return found
