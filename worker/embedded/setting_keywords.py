"""Settings of an embedded worker: the flags of `rollout-worker serve` as keyword arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout_worker.settings import (
    FLAGS,
    CommandFlag,
    InvalidSettings,
    WorkerSettings,
    parse_settings,
)

REFUSED_KEYWORDS = {
    "log_level": "logging is the trainer's: set the level of the logger 'rollout_worker'",
    "log_format": "logging is the trainer's: give the root logger a handler",
    **dict.fromkeys(
        ("turn_directory", "turn_devices", "turn_margin", "turn_holder"),
        "turns are the whole process's: take them with rollout_client.turn",
    ),
    **dict.fromkeys(
        (
            "rank",
            "leader_address",
            "gang_port",
            "gang_fetch",
            "gang_token_file",
            "member_addresses",
        ),
        "an embedded worker runs on one node",
    ),
}
"""Flags that make no sense within a trainer's process, and why; their variables are not read."""

KEYWORD_DEFAULTS = {"shutdown_grace": "0"}
"""Defaults that differ from those of `serve`: no router sends requests to a trainer that is about to end."""

_FLAGS: Mapping[str, CommandFlag] = {flag.field_name: flag for flag in FLAGS}


def settings_from_keywords(
    keywords: Mapping[str, object], environ: Mapping[str, str]
) -> WorkerSettings:
    """Return checked settings; a keyword that is None or missing is left to its variable.

    Raises:
        TypeError: A setting does not exist.
        InvalidSettings: Names the setting and the fix.
    """
    given = argparse.Namespace(**dict.fromkeys(_FLAGS))
    for name, value in keywords.items():
        if name not in _FLAGS:
            raise TypeError(f"Worker() has no setting {name!r}: see rollout-worker serve --help")
        if value is None:
            continue
        if name in REFUSED_KEYWORDS:
            raise InvalidSettings(
                f"{name} is not a setting of an embedded worker: {REFUSED_KEYWORDS[name]}"
            )
        setattr(given, name, _flag_text(_FLAGS[name], value))
    for name, text in KEYWORD_DEFAULTS.items():
        if getattr(given, name) is None and not environ.get(_FLAGS[name].variable_name):
            setattr(given, name, text)
    unread = {_FLAGS[name].variable_name for name in REFUSED_KEYWORDS}
    settings = parse_settings(
        given, {name: text for name, text in environ.items() if name not in unread}
    )
    if settings.nodes > 1:
        raise InvalidSettings(f"nodes is {settings.nodes}: an embedded worker runs on one node")
    return settings


def _flag_text(flag: CommandFlag, value: object) -> str | list[str]:
    """Return a value as on the command line, so that the same parser checks it."""
    if isinstance(value, str | int | float | Path) and not flag.repeated:
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        words = [str(each) for each in value]
        if flag.repeated:
            return words
        return (":" if flag.field_name == "weights_roots" else ",").join(words)
    kind = "a list of strings" if flag.repeated else "text, a number, a path or a list of these"
    raise InvalidSettings(f"{flag.field_name} is {value!r}: give {kind}")
