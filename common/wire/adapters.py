"""Adapters (LoRA) as a version of weights: how their tensors are named, what their configuration holds, who serves which.

A version holds either the tensors of the model, or those of adapters. An adapter named `policy` is made of tensors with
the names that PEFT gives them, and of its configuration as bytes, all below its name::

    adapters/policy/adapter_config.json                                                    U8 [n]
    adapters/policy/base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight         [r, in]
    adapters/policy/base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight         [out, r]

So adapters travel, are verified, staged, committed and kept as any version is, and the root hash binds all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from .wire_base import Wire

__all__ = ["MAX_ADAPTERS", "AdapterName", "ServedAdapter"]

MAX_ADAPTERS = 64
"""Most adapters of one version."""
MAX_CONFIG_BYTES = 2**16
"""Largest configuration of one adapter."""
MAX_RANK = 1024
ADAPTERS_PREFIX = "adapters/"
CONFIG_KEY = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"

AdapterName = Annotated[str, Field(strict=True, pattern=NAME_PATTERN)]


class ServedAdapter(Wire):
    """An adapter of a version: its content, rank, and name, by which requests ask for it."""

    name: str
    root_hash: str = Field(max_length=128)
    rank: int


class AdapterRefused(ValueError):
    """This can't be served as an adapter; the text names the field or tensor, and the fix."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What PEFT's configuration says of the arithmetic: `W x + scaling · B (A x)`.

    `base_root_hash`: of the model that it was trained on; None: not known.
    """

    rank: int
    alpha: float
    rslora: bool = False
    base_root_hash: str | None = None

    @property
    def scaling(self) -> float:
        """Factor of the adapter's part."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def encode(self) -> bytes:
        """Return the bytes that are published: the same for equal configurations."""
        fields = {
            "lora_alpha": self.alpha,
            "peft_type": "LORA",
            "r": self.rank,
            "use_rslora": self.rslora,
        }
        if self.base_root_hash is not None:
            fields["base_root_hash"] = self.base_root_hash
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, content: bytes) -> AdapterConfig:
        """Return the configuration in these bytes, PEFT's own or encoded ones.

        Raises:
            AdapterRefused: They are not one, or ask for more than plain LoRA.
        """
        if len(content) > MAX_CONFIG_BYTES:
            raise AdapterRefused(f"{CONFIG_KEY} has more than {MAX_CONFIG_BYTES} bytes")
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise AdapterRefused(f"{CONFIG_KEY} is not JSON: save the adapter again") from error
        if not isinstance(fields, dict):
            raise AdapterRefused(f"{CONFIG_KEY} holds no JSON object: save the adapter again")
        return cls.of_fields(fields)

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> AdapterConfig:
        """Return the configuration that PEFT's fields describe; raise as `decode`."""
        for field, plain, fix in _PLAIN_FIELDS:
            if (value := fields.get(field)) and value not in plain:
                raise AdapterRefused(f"{CONFIG_KEY}: {field} is {_shorten(value)}: {fix}")
        rank, alpha = fields.get("r"), fields.get("lora_alpha")
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 < rank <= MAX_RANK:
            raise AdapterRefused(f"{CONFIG_KEY}: r is {_shorten(rank)}: use 1 to {MAX_RANK}")
        if not isinstance(alpha, int | float) or not 0 < alpha < 1e9:
            raise AdapterRefused(
                f"{CONFIG_KEY}: lora_alpha is {_shorten(alpha)}: use a number above 0"
            )
        base = fields.get("base_root_hash")
        if base is not None and not (isinstance(base, str) and len(base) <= 128):
            raise AdapterRefused(f"{CONFIG_KEY}: base_root_hash is not a root hash: leave it out")
        return cls(rank, float(alpha), bool(fields.get("use_rslora")), base)


_MERGE = "merge it into the weights, or train plain LoRA"
_PLAIN_FIELDS: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("peft_type", ("LORA",), "only LoRA can be served"),
    ("bias", ("none",), _MERGE),
    ("use_dora", (), _MERGE),
    ("lora_bias", (), _MERGE),
    ("use_qalora", (), _MERGE),
    ("fan_in_fan_out", (), _MERGE),
    ("modules_to_save", (), _MERGE),
    ("trainable_token_indices", (), _MERGE),
    ("rank_pattern", (), "give all layers one rank"),
    ("alpha_pattern", (), "give all layers one lora_alpha"),
    ("layer_replication", (), _MERGE),
    ("target_parameters", (), "target modules"),
)
"""Fields with the values that change nothing; any value that counts as false changes nothing, too."""


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def entry_name(adapter: str, key: str) -> str:
    """Return the name in a version of an adapter's tensor."""
    return f"{ADAPTERS_PREFIX}{adapter}/{key}"


def split_entry(name: str) -> tuple[str, str]:
    """Return the adapter of a tensor of a version, and its name in there.

    Raises:
        AdapterRefused: The adapter's name is none.
    """
    adapter, _, key = name.removeprefix(ADAPTERS_PREFIX).partition("/")
    check_name(adapter)
    return adapter, key


def check_name(adapter: str) -> None:
    """Raise `AdapterRefused` for a name that no adapter may have."""
    if not re.fullmatch(NAME_PATTERN, adapter):
        raise AdapterRefused(
            f"{_shorten(adapter)} names no adapter: use up to 63 letters, digits, '.', '_' and '-'"
        )


_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.(lora_A|lora_B)(?:\.default)?\.weight")


def split_key(key: str) -> tuple[str, str]:
    """Return the module that a tensor of an adapter changes, and `lora_A` or `lora_B`.

    Raises:
        AdapterRefused: It is another kind of tensor.
    """
    found = _KEY.fullmatch(key)
    if found is None:
        raise AdapterRefused(
            f"tensor {_shorten(key)} is neither lora_A.weight nor lora_B.weight of a module: publish"
            " what get_peft_model_state_dict returns"
        )
    return found[1], found[2]


def tensor_key(module: str, half: str) -> str:
    """Return the name that versions give to half of a module's pair: PEFT's own."""
    return f"base_model.model.{module}.{half}.weight"
