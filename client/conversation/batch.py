"""Convert conversations to a trainer's batch and back: left-padded prompts, right-padded responses.

Names are verl's; docs/multi-turn.md lists each tensor with its shape, dtype and padding. Shapes are
[B, P], [B, R] and [B, P + R]: B conversations, P and R the padded lengths of prompts and responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollout_common.wire import WeightsSpan

from .columns import TokenColumns
from .conversation import Conversation

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class RolloutBatch:
    """A batch in the three parts of verl's DataProto.

    Attributes:
        batch: Tensors by name, as docs/multi-turn.md lists them.
        non_tensor_batch: Lists of length B: `request_id`, `messages`, `reward_scores`,
            `multi_modal_inputs`, `request` (everything else in a request), …
        meta_info: `pad_token_id`, and `logprobs_of`, the kind of logprobs.
    """

    batch: dict[str, torch.Tensor]
    non_tensor_batch: dict[str, list[Any]]
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.non_tensor_batch["request_id"])

    def to_tensordict(self) -> Any:
        """Return the tensors as a `tensordict.TensorDict` of batch size [B]; needs that package."""
        from tensordict import TensorDict

        return TensorDict(self.batch, batch_size=[len(self)])

    def to_dataproto(self) -> dict[str, Any]:
        """Return the arguments of verl's `DataProto`: a TensorDict, object arrays, a dict."""
        import numpy as np

        others = {}
        for key, values in self.non_tensor_batch.items():
            column = np.empty(len(values), dtype=object)
            column[:] = values
            others[key] = column
        return {
            "batch": self.to_tensordict(),
            "non_tensor_batch": others,
            "meta_info": dict(self.meta_info),
        }


def to_batch(
    requests: Sequence[Conversation],
    *,
    pad_token_id: int | None,
    prompt_length: int | None = None,
    response_length: int | None = None,
    pad_to_multiple_of: int = 1,
) -> RolloutBatch:
    """Return requests as one batch.

    Args:
        requests: At least one; all logprobs must be of one kind.
        pad_token_id: The padding token.
        prompt_length: Pad prompts to this length; None: to the longest.
        response_length: Pad responses to this length; None: to the longest.
        pad_to_multiple_of: Round both lengths up to a multiple of this.

    Raises:
        ValueError: No requests, no padding token, a prompt or response above the given length, or
            logprobs of two kinds.
    """
    import torch

    if pad_token_id is None or pad_to_multiple_of < 1:
        raise ValueError(
            f"pad_token_id={pad_token_id}, pad_to_multiple_of={pad_to_multiple_of}: pad_token_id "
            "must be an id (use eos_token_id if the tokenizer has no pad token), "
            "pad_to_multiple_of at least 1"
        )
    kinds = {request.logprobs_of for request in requests} - {None}
    if not requests or len(kinds) > 1:
        raise ValueError(
            f"got {len(requests)} requests with logprobs of kinds {sorted(map(str, kinds))}: a "
            "batch needs at least one request and logprobs of one kind"
        )
    prompts = [request.streams.prompt for request in requests]
    responses = [len(request.response_ids) for request in requests]
    prompt = _padded_length("prompt", prompts, prompt_length, pad_to_multiple_of)
    response = _padded_length("response", responses, response_length, pad_to_multiple_of)
    shape = len(requests), prompt + response
    rows = any(request.streams.rope for request in requests)
    batch = {
        "input_ids": torch.full(shape, pad_token_id),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
        "position_ids": torch.zeros((shape[0], 4, shape[1]) if rows else shape, dtype=torch.int64),
        "response_mask": torch.zeros((shape[0], response), dtype=torch.int64),
        "loss_mask": torch.zeros((shape[0], response), dtype=torch.int64),
        "rollout_log_probs": torch.zeros((shape[0], response)),
        "weights_epoch": torch.full((shape[0], response), -1),
        "weights_version": torch.full((shape[0], response), -1),
        "stale_kv": torch.zeros((shape[0], response), dtype=torch.bool),
    }
    for row, request in enumerate(requests):
        _fill_row({key: tensor[row] for key, tensor in batch.items()}, request.streams, prompt)
    batch["prompts"] = batch["input_ids"][:, :prompt].clone()
    batch["responses"] = batch["input_ids"][:, prompt:].clone()
    meta = {"pad_token_id": pad_token_id, "logprobs_of": next(iter(kinds), None)}
    return RolloutBatch(batch, _non_tensors(requests), meta)


def _padded_length(what: str, lengths: list[int], wanted: int | None, multiple: int) -> int:
    longest = max(lengths)
    if wanted is not None and longest > wanted:
        raise ValueError(
            f"{what} {lengths.index(longest)} has {longest} tokens, above {what}_length={wanted}"
        )
    length = longest if wanted is None else wanted
    return -(-length // multiple) * multiple


def _fill_row(row: dict[str, torch.Tensor], streams: TokenColumns, prompt: int) -> None:
    import torch

    start, length = prompt - streams.prompt, len(streams)
    end, answered = start + length, length - streams.prompt
    row["input_ids"][start:end] = torch.tensor(streams.ids, dtype=torch.int64)
    row["attention_mask"][start:end] = 1
    axes = streams.position_rows()
    positions = row["position_ids"].reshape(-1, row["position_ids"].shape[-1])
    text = range(length)
    wanted = [text] if len(positions) == 1 else [text, *(axes if len(axes) == 3 else axes * 3)]
    for target, axis in zip(positions, wanted, strict=True):
        target[start:end] = torch.tensor(list(axis), dtype=torch.int64)
        after = int(target[end - 1]) + 1 if length else 0
        target[end:] = torch.arange(after, after + len(target) - end)
    for key, column in (("response_mask", streams.sampled), ("loss_mask", streams.loss)):
        row[key][:answered] = torch.tensor(column[streams.prompt :], dtype=torch.int64)
    row["rollout_log_probs"][:answered] = torch.tensor(streams.logprobs[streams.prompt :])
    for span in streams.weights:
        where = slice(max(0, span.start - streams.prompt), span.end - streams.prompt)
        row["weights_epoch"][where] = span.epoch
        row["weights_version"][where] = span.version
        row["stale_kv"][where] = span.stale_kv


def _non_tensors(requests: Sequence[Conversation]) -> dict[str, list[Any]]:
    names = (
        "request_id", "batch_data_id", "rollout_offset", "messages", "reward_scores",
        "finish_reason", "multi_modal_inputs", "metrics",
    )  # fmt: skip
    found = {name: [getattr(request, name) for request in requests] for name in names}
    found["three_axes"] = [bool(request.streams.rope) for request in requests]
    spans = [request.weights_range for request in requests]
    for end, key in enumerate(("min_weights", "max_weights")):
        found[key] = [span[end].as_tuple() if span else None for span in spans]
    found["weights_spans"] = [list(request.streams.weights) for request in requests]
    found["request"] = [request.model_dump(exclude={"streams"}) for request in requests]
    return found


def from_batch(batch: RolloutBatch) -> list[Conversation]:
    """Return the requests of a batch, equal to the ones it was made from.

    Raises:
        ValueError: The tensors do not match the requests (rows or columns were dropped).
    """
    found = []
    others = batch.non_tensor_batch
    for row, rest in enumerate(others["request"]):
        tensors = {key: tensor[row] for key, tensor in batch.batch.items()}
        streams = _columns_of_row(tensors, others["three_axes"][row], others["weights_spans"][row])
        found.append(Conversation.model_validate({**rest, "streams": streams}))
    return found


def _columns_of_row(
    row: dict[str, torch.Tensor], three_axes: bool, spans: Sequence[WeightsSpan]
) -> TokenColumns:
    prompt = row["prompts"].shape[-1]
    mask = row["attention_mask"].bool()
    start, end = prompt - int(mask[:prompt].sum()), prompt + int(mask[prompt:].sum())
    if not bool(mask[start:end].all()) or end - start != int(mask.sum()):
        raise ValueError("attention_mask: the tokens of a row must be contiguous")
    answered = end - prompt

    def response(name: str, fill: float) -> list[Any]:
        return [fill] * (prompt - start) + row[name][:answered].tolist()

    positions = row["position_ids"]
    rope = positions[1:, start:end].tolist() if three_axes else []
    return TokenColumns.model_validate(
        {
            "prompt_length": prompt - start,
            "input_ids": row["input_ids"][start:end].tolist(),
            "loss_mask": response("loss_mask", 0),
            "response_mask": response("response_mask", 0),
            "rollout_log_probs": response("rollout_log_probs", 0.0),
            "rope_position_ids": rope,
            "weights": spans,
        }
    )
