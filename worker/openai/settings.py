"""How long things may take in this package, and why."""

from __future__ import annotations

# model_text.py

TEMPLATE_READ_SECONDS = 10.0
"""What the model's folder may take to give the chat template."""

TOKENIZER_SECONDS = 300.0
"""What a text may take to become ids, with those before it and the loading of the tokenizer."""


# openai_routes.py

DEFAULT_DEADLINE_SECONDS = 600.0
