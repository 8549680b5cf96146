"""Whether tensors are LoRA adapters of a model: names, shapes and configurations; pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rollout_common.wire import ActiveWeights
from rollout_common.wire.adapters import (
    ADAPTERS_PREFIX,
    CONFIG_KEY,
    MAX_ADAPTERS,
    MAX_CONFIG_BYTES,
    MAX_RANK,
    AdapterConfig,
    AdapterRefused,
    split_entry,
    split_key,
)
from rollout_worker.engine import TensorEntry, TensorSpec, WeightsLayout, WeightsRejected

DTYPES = frozenset({"F32", "F16", "BF16"})


def holds_adapters(entries: Sequence[TensorEntry]) -> bool:
    """Return whether these are the tensors of adapters, not of a model."""
    return any(entry.name.startswith(ADAPTERS_PREFIX) for entry in entries)


def check_base(active: ActiveWeights, checkpoint: str, *, empty: bool, resident: bool) -> None:
    """Refuse adapters where the weights that they change don't serve: the checkpoint, whose root hash is given.

    Raises:
        WeightsRejected: Says what serves, and the fix.
    """
    if not resident:
        raise WeightsRejected("adapters can't be staged while the weights sleep: wake them first")
    if not active.adapters and (empty or active.root_hash != checkpoint):
        raise WeightsRejected(
            f"adapters belong to the model's own checkpoint, and weights {active.identity} serve here: publish the"
            " checkpoint first, or start a pool whose model these weights are"
        )


def check_adapters(layout: WeightsLayout, entries: Sequence[TensorEntry], where: str) -> None:
    """Refuse tensors that are not adapters of the model with this layout; `where`: their source.

    Raises:
        WeightsRejected: Names the tensor and the fix.
    """
    mixed = next(
        (entry.name for entry in entries if not entry.name.startswith(ADAPTERS_PREFIX)), None
    )
    if mixed is not None:
        why = f"tensor {mixed!r} in {where!r} is not of an adapter: publish the model's tensors or adapters, not both"
        raise WeightsRejected(why, tensor=mixed)
    try:
        groups: dict[str, dict[str, TensorSpec]] = {}
        for entry in entries:
            name, key = split_entry(entry.name)
            groups.setdefault(name, {})[key] = entry.spec
        if len(groups) > MAX_ADAPTERS:
            raise AdapterRefused(f"{len(groups)} adapters: publish at most {MAX_ADAPTERS} at once")
        model = {**layout.optional, **layout.required}
        for name, own in groups.items():
            _check_tensors(name, own, model)
    except AdapterRefused as error:
        raise WeightsRejected(f"{where!r}: {error}") from error


def _check_tensors(
    name: str, own: Mapping[str, TensorSpec], model: Mapping[str, TensorSpec]
) -> None:
    config = own.get(CONFIG_KEY)
    if config is None or config.dtype != "U8" or config.nbytes > MAX_CONFIG_BYTES:
        raise AdapterRefused(
            f"adapter {name!r} needs {CONFIG_KEY}, as U8 of at most {MAX_CONFIG_BYTES} bytes"
        )
    pairs: dict[str, dict[str, TensorSpec]] = {}
    for key, spec in own.items():
        if key != CONFIG_KEY:
            module, half = split_key(key)
            pairs.setdefault(module, {})[half] = spec
    if not pairs:
        raise AdapterRefused(f"adapter {name!r} has no tensors: publish its lora_A and lora_B")
    for module, pair in pairs.items():
        _check_pair(f"adapter {name!r}, module {module!r}", pair, model.get(f"{module}.weight"))


def _check_pair(where: str, pair: Mapping[str, TensorSpec], weight: TensorSpec | None) -> None:
    if weight is None or len(weight.shape) != 2:
        raise AdapterRefused(f"{where}: the model's checkpoint has no such linear layer")
    if len(pair) != 2:
        raise AdapterRefused(f"{where}: publish both lora_A and lora_B")
    a, b = pair["lora_A"], pair["lora_B"]
    out, width = weight.shape
    rank = a.shape[0] if a.shape else 0
    if rank > MAX_RANK:
        raise AdapterRefused(f"{where}: its rank is {rank}: use at most {MAX_RANK}")
    for half, spec, want in (("lora_A", a, (rank, width)), ("lora_B", b, (out, rank))):
        if spec.shape != want or not rank:
            raise AdapterRefused(
                f"{where}: {half} is {spec}, with weights of {weight} it must be {list(want)}"
            )
        if spec.dtype not in DTYPES:
            raise AdapterRefused(
                f"{where}: {half} is {spec.dtype}: use {', '.join(sorted(DTYPES))}"
            )


def check_config(
    name: str, config: AdapterConfig, ranks: Collection[int], base_root_hash: str
) -> None:
    """Refuse an adapter whose configuration does not fit its tensors, or that was trained on other weights.

    `ranks`: of its tensors. `base_root_hash`: of the model's checkpoint.

    Raises:
        WeightsRejected: The text says what to change.
    """
    if wrong := [rank for rank in ranks if rank != config.rank]:
        raise WeightsRejected(
            f"adapter {name!r}: its tensors have rank {wrong[0]}, {CONFIG_KEY} says r {config.rank}"
        )
    if config.base_root_hash not in (None, base_root_hash):
        raise WeightsRejected(
            f"adapter {name!r} belongs to weights with root_hash {config.base_root_hash}, the model here has"
            f" {base_root_hash}: publish it to a pool with its own model"
        )
