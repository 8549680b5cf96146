"""Templates that were tried already, so that each is tried once a process."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from .messages import Message
from .processing import Codec
from .templates import Template

_MOST = 32
_KNOWN: OrderedDict[tuple[int, str], Template] = OrderedDict()


def template_of(
    processing_class: Any, tools: Sequence[Message] | None, options: Mapping[str, Any]
) -> Template:
    """Return the template of a tokenizer or processor, with what is known of it already."""
    text = getattr(processing_class, "chat_template", None)
    words = json.dumps([tools or [], dict(options), text], sort_keys=True, default=repr)
    key = id(processing_class), words
    found = _KNOWN.get(key)
    # An id may come again after its object is gone; a kept template keeps its object alive.
    if found is None or found.codec.source is not processing_class:
        found = _KNOWN[key] = Template(Codec(processing_class), tools, options)
        while len(_KNOWN) > _MOST:
            _KNOWN.popitem(last=False)
    return found
