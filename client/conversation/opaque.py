"""Serialize anything a message, a tool or a processor provides to JSON or msgpack, and back.

Tensors, arrays, images, bytes, tuples and mappings with non-string keys are written under a marker
key; dtype, shape and every bit are kept. Only what the value itself needs is imported.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, PlainSerializer, SerializationInfo

KIND = "$rollout"


def encode(value: Any, binary: bool) -> Any:
    """Return plain data; bytes stay bytes when `binary`, else they become base64.

    Raises:
        TypeError: Names the type that can't be serialized.
    """

    def raw(data: bytes) -> bytes | str:
        return data if binary else base64.b64encode(data).decode()

    if value is None or isinstance(value, bool | int | float | str):
        return value
    match value:
        case bytes() | bytearray():
            return {KIND: "bytes", "data": raw(bytes(value))}
        case list():
            return [encode(item, binary) for item in value]
        case tuple():
            return {KIND: "tuple", "items": [encode(item, binary) for item in value]}
        case Mapping():
            if all(isinstance(key, str) for key in value) and KIND not in value:
                return {key: encode(item, binary) for key, item in value.items()}
            pairs = [[encode(k, binary), encode(v, binary)] for k, v in value.items()]
            return {KIND: "mapping", "items": pairs}
    return _foreign(value, raw)


def _foreign(value: Any, raw: Callable[[bytes], bytes | str]) -> Any:
    module, name = type(value).__module__.partition(".")[0], type(value).__name__
    if module == "torch" and name in {"Tensor", "Parameter"}:
        return {KIND: "tensor", **_tensor(value), "data": raw(_tensor_bytes(value))}
    if module == "numpy":
        if not hasattr(value, "dtype") or value.dtype.kind in "OV":
            raise TypeError(f"numpy {name} of objects or records can't be serialized: use lists")
        whole = {"dtype": value.dtype.str, "shape": list(value.shape)}
        scalar = {} if name == "ndarray" else {"scalar": True}
        return {KIND: "array", **whole, **scalar, "data": raw(value.tobytes())}
    if module == "PIL":
        palette = value.getpalette() if value.mode == "P" else None
        whole = {"mode": value.mode, "size": list(value.size), "palette": palette}
        return {KIND: "image", **whole, "data": raw(value.tobytes())}
    raise TypeError(
        f"{module}.{name} can't be serialized: use a tensor, an array, a PIL image or bytes"
    )


def _tensor(value: Any) -> dict[str, Any]:
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}


def _tensor_bytes(value: Any) -> bytes:
    import torch

    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data: bytes = flat.numpy().tobytes()
    return data


def equal(a: Any, b: Any) -> bool:
    """Compare what `encode` accepts, and models of it; tensors and arrays by type and content."""
    if a is b:
        return True
    if isinstance(a, BaseModel):
        return type(a) is type(b) and equal(vars(a), vars(b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if hasattr(a, "dtype") and hasattr(b, "dtype"):
        alike = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        return alike and bool((a == b).all())
    return bool(a == b)


def decode(value: Any) -> Any:
    """Invert `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(KIND)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    if kind == "tuple":
        return tuple(decode(item) for item in value["items"])
    if kind == "mapping":
        return {decode(key): decode(item) for key, item in value["items"]}
    data = value["data"] if isinstance(value["data"], bytes) else base64.b64decode(value["data"])
    return data if kind == "bytes" else _RESTORE[kind](value, data)


def _as_tensor(value: Any, data: bytes) -> Any:
    import torch

    dtype = getattr(torch, value["dtype"])
    if not data:
        return torch.empty(value["shape"], dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(value["shape"])


def _as_array(value: Any, data: bytes) -> Any:
    import numpy as np

    found = np.frombuffer(bytearray(data), dtype=value["dtype"]).reshape(value["shape"])
    return found[()] if value.get("scalar") else found


def _as_image(value: Any, data: bytes) -> Any:
    from PIL import Image

    image = Image.frombytes(value["mode"], tuple(value["size"]), data)
    if value["palette"]:
        image.putpalette(value["palette"])
    return image


_RESTORE = {"tensor": _as_tensor, "array": _as_array, "image": _as_image}


def _dump(value: Any, info: SerializationInfo) -> Any:
    if info.mode_is_json():
        return encode(value, binary=False)
    return encode(value, binary=True) if info.context else value


Opaque = Annotated[Any, BeforeValidator(decode), PlainSerializer(_dump)]
"""A field for any plain data, tensors, arrays and images."""
