"""Durations of this package in seconds, each with its reason."""

from __future__ import annotations

TEMPLATE_READ_SECONDS = 10.0
"""To read the chat template from the model's folder: milliseconds, unless the file system hangs."""

TOKENIZER_SECONDS = 300.0
"""For a text to become ids, with the texts before it and the tokenizer's loading, a minute at worst."""

DEFAULT_DEADLINE_SECONDS = 590.0
"""For a request: OpenAI's own client waits for 600 s and then sends it again, so it gets what is there before."""
