"""Load a model from its folder, and find which of its tensors hold those of the checkpoint.

transformers fuses some tensors of a checkpoint, such as the experts of a layer, into one of the model's. To find where
each of them is in it, the elements of the fused one are numbered and split by the code of `save_pretrained`: the
numbers in a part say where it was.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion  # as `save_pretrained` does
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

from rollout_common.transfer.layout import layer_of
from rollout_common.wire import Progress
from rollout_worker.engine import EngineError, WeightsLayout
from rollout_worker.engines.hf.attention import attention_implementation
from rollout_worker.engines.hf.settings import HfSettings
from rollout_worker.engines.model_folder import (
    checkpoint_dtype,
    load_tokenizer,
    read_config,
    read_eos_ids,
    resolve_max_length,
)
from rollout_worker.engines.options import EngineOptions
from rollout_worker.engines.picture_model import (
    PICTURE_FAMILIES,
    PictureModel,
    load_picture_model,
)
from rollout_worker.sources.checkpoint_files import FileSource, open_source
from rollout_worker.sources.source_reading import read_source
from rollout_worker.weights import OUTPUT_HEAD

from .buffers import TensorSink

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FusedPart:
    """Where a tensor of the checkpoint is in `home`, a tensor of the model that has the shape `whole`.

    `shape`: of the checkpoint's tensor; `strides` and `offset`: of its elements in the home, in elements.
    """

    home: Tensor
    whole: torch.Size
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its home: the checkpoint only has another name for it."""
        whole = torch.empty(self.whole, device="meta").stride()
        steps = zip(self.shape, self.strides, whole, strict=False)
        return self.shape == self.whole and all(a == b for size, a, b in steps if size > 1)


@dataclass(slots=True)
class LoadedModel:
    """A model that can run.

    `targets` maps the checkpoint's names to the model's tensors that hold them, `parts` the names of tensors
    that are only a part of one. `pictures`: how it takes pictures, if it does.
    """

    model: Any
    tokenizer: Any | None
    layout: WeightsLayout
    targets: dict[str, Tensor]
    root_hash: str
    eos_token_ids: frozenset[int]
    max_length: int
    vocab_size: int
    parts: dict[str, FusedPart] = field(default_factory=dict)
    pictures: PictureModel | None = None

    @property
    def device(self) -> str:
        """Kind of the device: cpu or cuda."""
        return str(self.model.device.type)


def load_model(
    options: EngineOptions,
    settings: HfSettings,
    report: Callable[[Progress], None],
    cancelled: Callable[[], bool],
) -> LoadedModel:
    """Load the model; blocks.

    Raises:
        EngineError: this engine can't serve the model; the text says what to change.
    """
    report(Progress(message="reading the model's configuration"))
    config = _load_config(options)
    text = config.get_text_config()
    vocab = int(text.vocab_size)
    eos = read_eos_ids(options.model, text.eos_token_id, vocab)
    length = resolve_max_length(options.max_length, getattr(text, "max_position_embeddings", None))
    _refuse_other_arithmetic(text, length, settings)
    source = open_source(options.model)
    dtype = _choose_dtype(options, config, source)
    device = _choose_device(options)
    if (device.type, dtype) == ("cpu", torch.bfloat16) and _emulates_bfloat16():
        logger.warning("this CPU emulates bfloat16: --dtype float32 is several times as fast")

    tensors, root = _read_checkpoint(source, dtype, config, report, cancelled)
    report(Progress(message="building the model"))
    if not options.guest:  # what holds for the whole process is its owner's choice
        transformers.utils.logging.disable_progress_bar()
        # On Hopper and Blackwell torch prefers cuDNN's attention, which builds a plan for each new length of
        # a row, that is for each step: 0.1 s.
        torch.backends.cuda.enable_cudnn_sdp(False)
    model = _build_model(config, tensors, dtype, settings).to(device)
    layout, targets, parts = _find_layout(model, source)
    return LoadedModel(
        model=model,
        tokenizer=load_tokenizer(options.model),
        layout=layout,
        targets=targets,
        parts=parts,
        root_hash=root,
        eos_token_ids=eos,
        max_length=length,
        vocab_size=vocab,
        pictures=load_picture_model(options.model, config),
    )


def _read_checkpoint(
    source: FileSource,
    dtype: torch.dtype,
    config: Any,
    report: Callable[[Progress], None],
    cancelled: Callable[[], bool],
) -> tuple[dict[str, Tensor], str]:
    def advance(done: int, total: int) -> None:
        fraction = done / total if total else 1.0
        report(Progress(message=f"loading weights {fraction:.0%}", fraction=fraction))

    # Tensors that a model keeps in float32 whatever the dtype must not be rounded first.
    precise = any(
        getattr(_model_class(config), name, None)
        for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    )
    buffers = TensorSink(None if precise else dtype)
    root = read_source(source, {}, buffers.allocate, advance, cancelled)
    buffers.seal()
    return buffers.tensors, root


def _load_config(options: EngineOptions) -> Any:
    read_config(options.model)
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(options.model), local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, OSError) as error:
        raise EngineError(f"transformers does not know this model: {error}") from error
    _model_class(config)
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    odd = kinds - {"full_attention", "sliding_attention"}
    if odd:
        raise EngineError(
            f"the hf engine has no cache for layers of the kind {', '.join(sorted(odd))}: serve "
            f"{config.model_type!r} with the vllm or sglang engine"
        )
    return config


def _refuse_other_arithmetic(text: Any, length: int, settings: HfSettings) -> None:
    """Refuse what would give logprobs of another model than the checkpoint's."""
    if settings.attention == "sdpa" and getattr(text, "attn_logit_softcapping", None):
        raise EngineError(
            f"{text.model_type!r} caps its attention's logits, which sdpa leaves out: use --attention eager"
        )
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    first = rope.get("original_max_position_embeddings")
    first = first or getattr(text, "original_max_position_embeddings", None)
    kind = rope.get("rope_type") or rope.get("type")
    if kind == "longrope" and first and length > first:
        # Its positions are computed otherwise once any token of a pass is beyond: for all rows, and keys that are kept.
        raise EngineError(
            f"{text.model_type!r} has other positions beyond {first} tokens (longrope), which the hf engine can't mix in"
            f" one batch: set --max-length {first} (spec.model.maxLength), or use the vllm or sglang engine"
        )


def _model_class(config: Any) -> Any:
    """Return the class of a model that writes text, perhaps about pictures."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if config.model_type in PICTURE_FAMILIES:
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    raise EngineError(
        f"model_type {config.model_type!r} is not a causal language model, nor one of those with "
        f"pictures that the hf engine serves ({', '.join(PICTURE_FAMILIES)})"
    )


def _attention_of(config: Any, kind: str) -> str | dict[str, str]:
    """Return the implementation of attention of each part: ours has the KV rows, which a vision part has not."""
    text = config.get_text_config()
    if text is config:
        return attention_implementation(_model_class(config), kind)
    ours = attention_implementation(MODEL_MAPPING[type(text)], kind)
    return {"": kind, "text_config": ours, "vision_config": kind}


def _choose_dtype(options: EngineOptions, config: Any, source: FileSource) -> torch.dtype:
    named = getattr(config, "dtype", None)
    if options.dtype == "auto" and isinstance(named, torch.dtype):
        return named
    most = checkpoint_dtype(source.entries) or "float32"
    dtype: torch.dtype = getattr(torch, most if options.dtype == "auto" else options.dtype)
    return dtype


def _emulates_bfloat16() -> bool:
    return torch.backends.cpu.get_cpu_capability() in {"DEFAULT", "AVX2"}


def _choose_device(options: EngineOptions) -> torch.device:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise EngineError("device cuda is asked for, but torch sees none: use cpu or check drivers")
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(auto if options.device == "auto" else options.device)


def _build_model(
    config: Any, tensors: dict[str, Tensor], dtype: torch.dtype, settings: HfSettings
) -> Any:
    """Make the model around the tensors, without a copy."""
    model, info = _model_class(config).from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        attn_implementation=_attention_of(config, settings.attention),
        output_loading_info=True,
    )
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            name = sorted(str(key) for key in info[kind])[0]
            raise EngineError(
                f"the checkpoint does not fit its config.json: tensor {name} is "
                f"{kind.split('_')[0]}; use the folder as it was published"
            )
    return model.eval().requires_grad_(False)


def _find_layout(
    model: Any, source: FileSource
) -> tuple[WeightsLayout, dict[str, Tensor], dict[str, FusedPart]]:
    """Return what a version of this model must hold, and the `targets` and `parts` of `LoadedModel`."""
    held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    held |= {name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()}
    specs = {entry.name: entry.spec for entry in source.entries}
    canonical: dict[int, str] = {}
    for name in sorted(specs, key=_head_last):
        if name in held:
            canonical.setdefault(id(held[name]), name)
    by_name = sorted(held, key=_head_last, reverse=True)
    homes = {id(held[name]): name for name in by_name}  # one name of each: the last one stays
    uncovered = sorted(name for key, name in homes.items() if key not in canonical)
    parts = find_fused_parts(model, held, uncovered)
    if parts.keys() <= specs.keys():
        covered = {id(part.home) for part in parts.values()}
        uncovered = [name for name in uncovered if id(held[name]) not in covered]
    renamed = {name: part.home for name, part in parts.items() if part.is_whole}
    canonical |= {id(home): name for name, home in renamed.items()}
    tied = _tied_names(held, canonical, renamed)
    required = {name: specs[name] for name in (*canonical.values(), *parts) if name in specs}
    optional = {name: spec for name, spec in specs.items() if name not in required}
    optional |= {name: required[target] for name, target in tied.items()}
    layout = WeightsLayout(required, optional, tied)
    if uncovered:
        # transformers makes tensors of some models in a way that `find_fused_parts` can't reverse.
        logger.warning("weights of this model cannot be updated: no %s in it", uncovered[0])
        return layout, {}, {}
    homes_of = {name: part.home for name, part in parts.items()}
    targets = {name: homes_of[name] if name in parts else held[name] for name in required}
    return layout, targets, {name: part for name, part in parts.items() if name not in renamed}


def _head_last(name: str) -> tuple[bool, str]:
    return name == OUTPUT_HEAD, name


def _tied_names(
    held: Mapping[str, Tensor], canonical: Mapping[int, str], renamed: Collection[str]
) -> dict[str, str]:
    """Return, by the model's names of tensors that a checkpoint may have in addition, the ones that they must equal."""
    found = {
        name: canonical[id(tensor)] for name, tensor in held.items() if id(tensor) in canonical
    }
    return {
        name: target
        for name, target in found.items()
        # What the model renames has its own name there only once.
        if name != target and (name == OUTPUT_HEAD or target not in renamed)
    }


def find_fused_parts(
    model: Any, held: Mapping[str, Tensor], names: Collection[str]
) -> dict[str, FusedPart]:
    """Return, by the checkpoint's names, what these tensors of a model are made of; empty if that is unknown.

    `held`: the model's tensors by its own names; `names`: those that its checkpoint does not have.
    """
    layers: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name in names:
        layers[layer_of(name)][name] = held[name]
    parts: dict[str, FusedPart] = {}
    for homes in layers.values():
        numbers, start = {}, 0
        starts: dict[str, int] = {}
        for name, home in homes.items():
            starts[name] = start
            numbers[name] = torch.arange(start, start + home.numel()).view(home.shape)
            start += home.numel()
        for name, where in revert_weight_conversion(model, dict(numbers)).items():
            made = (_locate_part(where, homes[home], starts[home]) for home in homes)
            if (part := next(filter(None, made), None)) is None:
                return {}
            parts[name] = part
    return parts


def _locate_part(where: Tensor, home: Tensor, start: int) -> FusedPart | None:
    """Return where a tensor is in a home whose numbers begin at `start`; None if not all of it is, or not in order."""
    if not where.numel():
        return None
    offset = int(where.reshape(-1)[0]) - start
    strides = tuple(
        int(where.select(dim, 1).reshape(-1)[0]) - start - offset if size > 1 else 0
        for dim, size in enumerate(where.shape)
    )
    last = offset + sum((size - 1) * step for size, step in zip(where.shape, strides, strict=True))
    if min(offset, *strides) < 0 or last >= home.numel():
        return None
    # Only as many numbers as the part has: a home may have those of a hundred experts.
    numbers = torch.tensor(start + offset)
    for size, step in zip(where.shape, strides, strict=True):
        numbers = numbers.unsqueeze(-1) + torch.arange(size) * step
    if not torch.equal(numbers, where):
        return None
    return FusedPart(home, home.shape, where.shape, strides, offset)


def fuse_tensors(
    parts: Mapping[str, FusedPart], tensors: Mapping[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Return each of the model's fused tensors with its new value, made of the checkpoint's tensors."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for name, part in parts.items():
        tensor = tensors[name]
        key = id(part.home)
        if key not in made:
            made[key] = part.home, torch.empty(part.whole, dtype=tensor.dtype, device=tensor.device)
        torch.as_strided(made[key][1], part.shape, part.strides, part.offset).copy_(tensor)
    return list(made.values())
