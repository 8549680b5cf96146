"""The multi-turn `RolloutRequest`: ids, masks, logprobs and weights of a whole conversation.

From the ground up: `buffers` (growing columns), `streams` (one column a quantity), `positions`
(three-axis rope), `messages`, `opaque` and `media` (what travels with the tokens), `processing`
(tokenizers and processors), `windows` and `seams` (a turn without its conversation), `templates`
(what a turn adds), `prompts` (the first turn), `sanity` (the check at the end), `record` (the
data), `writing` and `request` (the operations), `batch` (tensors for a trainer). Nothing imports
torch before a tensor is asked for.
"""

from .batch import RolloutBatch, from_batch, to_batch
from .messages import ToolResponse
from .processing import TemplateError
from .prompts import OverlongPrompt, PromptTooLong
from .record import FinishReason, RequestState
from .request import RolloutRequest
from .sanity import Difference, SanityCheckMode

__all__ = [
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
