"""A multi-turn `Conversation`: its ids, masks, logprobs and weights.

Bottom up: `columns` (one column per quantity), `template_messages`, `media`, `boundaries` (a turn
after the ids before it), `codec` (tokenizers and processors), `examples` (short stand-ins for a
conversation), `content_forms` (the form in which a template takes contents and calls), `templates`
(what a turn adds), `sanity_check`, `conversation_data` (the fields), `writer` and `conversation`
(the operations), `batch` (tensors for a trainer). Nothing imports torch until a tensor is needed.
"""

from .batch import RolloutBatch, from_batch, to_batch
from .codec import TemplateError
from .conversation import Conversation
from .conversation_data import FinishReason, OverlongPrompt, RequestState
from .sanity_check import Difference, SanityCheckMode
from .template_messages import ToolResponse
from .writer import PromptTooLong

RolloutRequest = Conversation
"""The name under which `rollout_worker.schemas` exports it."""

__all__ = [
    "Conversation",
    "Difference",
    "FinishReason",
    "OverlongPrompt",
    "PromptTooLong",
    "RequestState",
    "RolloutBatch",
    "RolloutRequest",
    "SanityCheckMode",
    "TemplateError",
    "ToolResponse",
    "from_batch",
    "to_batch",
]
