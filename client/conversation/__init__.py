"""A multi-turn `Conversation`: ids, masks, logprobs and weights of a whole conversation.

Bottom up: `buffers` (growing columns), `streams` (one column per quantity), `positions` (three-axis
rope), `messages`, `opaque` and `media` (what accompanies the tokens), `processing` (tokenizers and
processors), `windows` and `seams` (a turn without its conversation), `forms` (how a template takes
contents and calls), `templates` (what a turn adds), `known` (those tried before), `answers`
(contents without calls), `prompts` (the first turn), `sanity` (the final check), `record` (the
data), `writing` and `request` (the operations), `batch` (tensors for a trainer). Nothing imports
torch until a tensor is needed.
"""

from .batch import RolloutBatch, from_batch, to_batch
from .conversation import Conversation
from .messages import ToolResponse
from .processing import TemplateError
from .prompts import OverlongPrompt, PromptTooLong
from .record import FinishReason, RequestState
from .sanity import Difference, SanityCheckMode

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
