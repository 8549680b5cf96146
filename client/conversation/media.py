"""Media and other objects of a conversation: their JSON and msgpack forms, and their tensors by turn.

Tensors, arrays, images, bytes, tuples and mappings with non-string keys are written under a marker
key; dtype, shape and every bit are kept. Only the packages that a value itself needs are imported.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, SerializationInfo

from .template_messages import MediaLists

KIND_FIELD = "$rollout"


def encode_value(value: Any, binary: bool) -> Any:
    """Return plain data; bytes stay bytes if `binary`, otherwise they become base64."""

    def raw(data: bytes) -> bytes | str:
        return data if binary else base64.b64encode(data).decode()

    if value is None or isinstance(value, bool | int | float | str):
        return value
    match value:
        case bytes() | bytearray():
            return {KIND_FIELD: "bytes", "data": raw(bytes(value))}
        case list():
            return [encode_value(item, binary) for item in value]
        case tuple():
            return {KIND_FIELD: "tuple", "items": [encode_value(item, binary) for item in value]}
        case Mapping():
            if all(isinstance(key, str) for key in value) and KIND_FIELD not in value:
                return {key: encode_value(item, binary) for key, item in value.items()}
            pairs = [[encode_value(k, binary), encode_value(v, binary)] for k, v in value.items()]
            return {KIND_FIELD: "mapping", "items": pairs}
    return _encode_object(value, raw)


def _encode_object(value: Any, raw: Callable[[bytes], bytes | str]) -> Any:
    module, name = type(value).__module__.partition(".")[0], type(value).__name__
    if module == "torch" and name in {"Tensor", "Parameter"}:
        import torch

        # As bytes: numpy has no bfloat16.
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        dtype = str(value.dtype).removeprefix("torch.")
        whole = {KIND_FIELD: "tensor", "dtype": dtype, "shape": list(value.shape)}
        return {**whole, "data": raw(flat.tobytes())}
    if module == "numpy":
        if not hasattr(value, "dtype") or value.dtype.kind in "OV":
            raise TypeError(f"numpy {name} of objects or records can't be serialized: use lists")
        whole = {KIND_FIELD: "array", "dtype": value.dtype.str, "shape": list(value.shape)}
        scalar = {} if name == "ndarray" else {"scalar": True}
        return {**whole, **scalar, "data": raw(value.tobytes())}
    if module == "PIL":
        palette = value.getpalette() if value.mode == "P" else None
        whole = {KIND_FIELD: "image", "mode": value.mode, "size": list(value.size)}
        return {**whole, "palette": palette, "data": raw(value.tobytes())}
    raise TypeError(
        f"{module}.{name} can't be serialized: use a tensor, an array, a PIL image or bytes"
    )


def equal_values(a: Any, b: Any) -> bool:
    """Compare what `encode_value` accepts, and models of it; tensors and arrays by type and content."""
    if a is b:
        return True
    if isinstance(a, BaseModel):
        return type(a) is type(b) and equal_values(vars(a), vars(b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal_values(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal_values, a, b))
    if hasattr(a, "dtype") and hasattr(b, "dtype"):
        alike = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        return alike and bool((a == b).all())
    return bool(a == b)


def decode_value(value: Any) -> Any:
    """Invert `encode_value`."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(KIND_FIELD):
        case None:
            return {key: decode_value(item) for key, item in value.items()}
        case "tuple":
            return tuple(decode_value(item) for item in value["items"])
        case "mapping":
            return {decode_value(key): decode_value(item) for key, item in value["items"]}
    data = value["data"] if isinstance(value["data"], bytes) else base64.b64decode(value["data"])
    return _decode_object(value, data)


def _decode_object(value: Any, data: bytes) -> Any:
    match value[KIND_FIELD]:
        case "bytes":
            return data
        case "tensor":
            import torch

            dtype = getattr(torch, value["dtype"])
            # An empty buffer can't be read.
            flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0)
            return flat.to(dtype).reshape(value["shape"])
        case "array":
            import numpy as np

            found = np.frombuffer(bytearray(data), dtype=value["dtype"]).reshape(value["shape"])
            return found[()] if value.get("scalar") else found
        case "image":
            from PIL import Image

            image = Image.frombytes(value["mode"], tuple(value["size"]), data)
            if value["palette"]:
                image.putpalette(value["palette"])
            return image
        case kind:
            raise ValueError(f"{KIND_FIELD} is {kind!r}: a newer version wrote it")


def _dump_field(value: Any, info: SerializationInfo) -> Any:
    if info.mode_is_json():
        return encode_value(value, binary=False)
    return encode_value(value, binary=True) if info.context else value


SerializableData = Annotated[Any, BeforeValidator(decode_value), PlainSerializer(_dump_field)]
"""A field for any plain data, tensors, arrays and images."""


class MediaTurn(BaseModel):
    """Media of the tokens `[start, end)`: tensors by name, and how many items of each key."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    start: int
    end: int
    inputs: SerializableData
    counts: dict[str, int]


def join_media(turns: list[MediaTurn]) -> dict[str, Any]:
    """Return the tensors of all turns, concatenated on their first axis."""
    keys = dict.fromkeys(key for turn in turns for key in turn.inputs)
    return {
        key: _concatenate_values([turn.inputs[key] for turn in turns if key in turn.inputs])
        for key in keys
    }


def _concatenate_values(values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if type(values[0]).__module__.partition(".")[0] == "numpy":
        import numpy as np

        return np.concatenate(values)
    import torch

    return torch.cat(values)


def cut_media(
    turns: list[MediaTurn], data: Mapping[str, list[Any]], length: int
) -> tuple[list[MediaTurn], MediaLists, int]:
    """Return the media turns and items of the first tokens, and the length that remains.

    A turn with media is kept or cut as a whole, so the length may be less than the one asked for.
    """
    turns, items = list(turns), {key: list(values) for key, values in data.items()}
    while turns and turns[-1].end > length:
        turn = turns.pop()
        length = min(length, turn.start)
        for key, count in turn.counts.items():
            if count:
                del items[key][-count:]
    return turns, items, length
