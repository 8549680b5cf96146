"""Model folders that can't be served, and what every engine says of them."""

from __future__ import annotations

from pathlib import Path

DAMAGE = [
    ("config.json", None, r"holds no config\.json: point to a model folder"),
    ("config.json", "{", r"config\.json' cannot be read: .*; repair or remove it"),
    (
        "generation_config.json",
        "{",
        r"generation_config\.json' cannot be read: .*; repair or remove",
    ),
    ("generation_config.json", "[2]", r"generation_config\.json' holds no JSON object"),
    ("generation_config.json", '{"eos_token_id": "</s>"}', r"is '</s>': it must be a token id or"),
]
"""File, its text (None: it is missing) and a pattern of what is said."""


def damage(folder: Path, name: str, text: str | None) -> None:
    """Give a folder that is whole one of these faults."""
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
