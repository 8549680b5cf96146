"""One interface to tokenizers and multimodal processors: render, encode, decode.

Anything with the methods of a `transformers` tokenizer or processor works; this module imports
neither transformers nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from .messages import STAND_IN, Media, Message
from .positions import RopeLayout

_TEXT_KEYS = frozenset(
    {
        *("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "position_ids"),
        *("special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping", "length"),
    }
)
_PARTS = ("image_processor", "video_processor", "feature_extractor", "audio_processor")


class TemplateError(ValueError):
    """A chat template rejected messages, or can't be continued; says which and why."""


class Codec:
    """A tokenizer, or a processor with its tokenizer."""

    def __init__(self, processing_class: Any) -> None:
        self.source = processing_class
        self.parts = [p for name in _PARTS if (p := getattr(processing_class, name, None))]
        self.tokenizer = processing_class.tokenizer if self.parts else processing_class

    @cached_property
    def rope(self) -> RopeLayout | None:
        """How positions are laid out; None: they just count up."""
        return RopeLayout.of(self.source)

    @cached_property
    def specials(self) -> dict[str, int]:
        """Added tokens, which never merge with ordinary text, and their ids."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        found = {str(token): int(index) for index, token in added.items()}
        texts = getattr(self.tokenizer, "all_special_tokens", ())
        return found | {text: self.tokenizer.convert_tokens_to_ids(text) for text in texts}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of added tokens."""
        return frozenset(self.specials.values())

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a turn, according to the tokenizer."""
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return frozenset(() if eos is None else eos if isinstance(eos, list) else (eos,))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        options: Mapping[str, Any],
        *,
        generation_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation.

        Raises:
            TemplateError: The template rejected the messages.
        """
        try:
            text = self.source.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **options,
            )
        except Exception as error:  # a template may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages[-6:])
            raise TemplateError(
                f"the chat template rejected messages (… {roles}): {error}"
            ) from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; adds no BOS, as templates print their own.

        Raises:
            TemplateError: The text holds a stand-in's word (`windows`) instead of a content.
        """
        return self._ids(_real(text))

    def _ids(self, text: str) -> list[int]:
        if not text:
            return []
        fast = self._fast
        if fast is not None and fast.truncation is None and fast.padding is None:
            ids: list[int] = fast.encode(text, add_special_tokens=False).ids
        else:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    @cached_property
    def _fast(self) -> Any:
        """The tokenizer's Rust backend, if it has one: half the cost for a short text."""
        return getattr(self.tokenizer, "backend_tokenizer", None)

    def encode_after(self, context: str, text: str) -> tuple[list[int], bool]:
        """Return the ids of a text that follows another, and whether the seam is clean.

        It is not clean if the tokenizer merges across the seam: no ids appended to the context's
        would equal those of the whole. Then the ids of the text alone are returned.

        Raises:
            TemplateError: See `encode`; the context may hold such words.
        """
        before = self._ids(context)
        whole = self._ids(context + _real(text))
        if whole[: len(before)] == before:
            return whole[len(before) :], True
        return self.encode(text), False

    def encode_media(
        self, text: str, media: Media, options: Mapping[str, Any]
    ) -> tuple[list[int], dict[str, Any]]:
        """Return the ids of a text with its media inserted, and the tensors of the media alone.

        Raises:
            ValueError: Media need a processor, but there is only a tokenizer.
        """
        given = {key: items for key, items in media.items() if items}
        if not given:
            return self.encode(text), {}
        if not self.parts:
            counts = ", ".join(f"{len(items)} {key}" for key, items in given.items())
            raise ValueError(f"got {counts} with a bare tokenizer: pass the model's processor")
        names = {"image": "images", "video": "videos", "audio": "audio"}
        arguments = {names[key]: items for key, items in given.items()}
        found = dict(
            self.source(
                text=[_real(text)],
                return_tensors="pt",
                add_special_tokens=False,
                **arguments,
                **options,
            )
        )
        ids = [int(token) for token in found["input_ids"][0]]
        return ids, {key: value for key, value in found.items() if self._is_media(key, value, ids)}

    @cached_property
    def _media_names(self) -> frozenset[str]:
        return frozenset(n for p in self.parts for n in getattr(p, "model_input_names", ()))

    def _is_media(self, key: str, value: Any, ids: Sequence[int]) -> bool:
        if key in self._media_names:
            return True
        own = getattr(self.tokenizer, "model_input_names", ())
        return (
            key not in _TEXT_KEYS
            and key not in own
            and tuple(getattr(value, "shape", ())) != (1, len(ids))
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)


def _real(text: str) -> str:
    """Return a text that is to be recorded; the last check of what the words of trials become."""
    if found := STAND_IN.search(text):
        raise TemplateError(
            f"the chat template prints {found[0]!r} in place of a content: it moves earlier "
            "messages into later turns; use another template"
        )
    return text
