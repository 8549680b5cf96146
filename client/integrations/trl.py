"""TRL's `rollout_func` over a pool: GRPOTrainer (TRL 1.16) samples there instead of in a server of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import distributed

from rollout_client.pool import RolloutPool

if TYPE_CHECKING:
    from rollout_client.steering.pushing.options import PushOptions


class TrlRollout:
    """Publishes the trainer's weights whenever they have changed, then samples a completion for each prompt.

    One for each process of the trainer, `GRPOTrainer(…, rollout_func=TrlRollout(pool))`. In a process group
    all ranks publish together, each its own shards.

    Args:
        pool: The pool, whose model is the trainer's.
        options: Further options of `publish_weights`, such as `transport`.
    """

    def __init__(self, pool: RolloutPool, **options: Any) -> None:
        self.pool = pool
        self._options: PushOptions = {"cast": True, **options}  # type: ignore[typeddict-item]
        self._published: int | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return `prompt_ids`, `completion_ids` and `logprobs`, one list of each prompt.

        Args:
            prompts: Texts or messages; TRL repeats each as often as the group wants completions of it.
            trainer: The GRPOTrainer. Its `args` say how to sample.

        Raises:
            ManyFailed: Some prompts could not be completed; it has all results.
            PublishError: See `RolloutPool.publish_weights`.
            ValueError: The model has adapters that are not merged, the trainer has tools, a prompt has a picture, or a
                sampling option is one that no pool has.
        """
        if trainer.tools:
            raise ValueError(
                "TRL samples the turns after a tool call with its own model, not in a pool: leave tools and"
                " environment_factory out, or run the tools in a rollout_func of yours"
            )
        self._publish_step(trainer)
        ids = _encode_prompts(prompts, trainer)
        # The logprobs that TRL compares with are of the distribution after the temperature.
        results = self.pool.generate_many(ids, sampling=_sampling_of(trainer), logprobs="sampling")
        return {
            "prompt_ids": ids,
            "completion_ids": [list(result.token_ids) for result in results],
            "logprobs": [list(result.logprobs) for result in results],
        }

    def _publish_step(self, trainer: Any) -> None:
        """Publish what the trainer has now; its step is the version."""
        step = trainer.state.global_step
        if step == self._published:
            return
        model = trainer.accelerator.unwrap_model(trainer.model)
        if hasattr(model, "merge_and_unload"):
            raise ValueError(
                "the model has PEFT adapters, which TrlRollout does not publish: train all weights, merge them, or"
                " publish them with publish_weights(version, adapters=…) in a rollout_func of yours"
            )
        options = self._options
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            options = {**options, "ranks": distributed.group.WORLD}
        self.pool.publish_weights(step, tensors=model, **options)
        self._published = step


def _encode_prompts(prompts: list[Any], trainer: Any) -> list[list[int]]:
    """Return the prompts' token ids, as TRL's own way of generating would make them."""
    processor = trainer.processing_class
    if any(map(_has_picture, prompts)):
        raise ValueError(
            "TrlRollout sends no pictures: write a rollout_func that calls pool.generate(…, images=…)"
        )
    if isinstance(prompts[0], str):
        encoded = processor(text=prompts)
    else:
        encoded = processor.apply_chat_template(
            prompts,
            tools=trainer.tools or None,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **trainer.chat_template_kwargs,
        )
    return [list(ids) for ids in encoded["input_ids"]]


def _has_picture(prompt: Any) -> bool:
    """Whether a prompt is of messages, and one of them has a picture."""
    contents = (message.get("content") for message in prompt if isinstance(message, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(part.get("type") == "image" for part in parts)


def _sampling_of(trainer: Any) -> dict[str, Any]:
    """Return a GRPOTrainer's sampling as a pool takes it."""
    args = trainer.args
    sampling = {
        "max_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p or 0,
        "repetition_penalty": args.repetition_penalty,
    }
    sampling |= args.generation_kwargs or {}
    if not sampling.get("ignore_eos"):
        # The tokenizer's end of a turn, too, by which TRL masks: the checkpoint may not name it.
        stops = {*(sampling.get("stop_token_ids") or ()), *trainer.eos_token_ids}
        sampling["stop_token_ids"] = sorted(stops)
    return sampling
