"""Bounded lists and mappings of a body: validated in steps, and only up to the first bad element.

Between two steps the event loop gets its turn, wherever the validation runs.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import InitErrorDetails, PydanticKnownError

SLICE_LENGTH = 2**14
"""Elements of a list that are validated at once, which takes about a millisecond."""


def bounded_length(most: int) -> WrapValidator:
    """For a list or a mapping of at most so many elements."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(value, list | dict) or len(value) <= 1:
            return handler(value)
        if len(value) > most:
            kind = "Dictionary" if isinstance(value, dict) else "List"
            sizes = {"field_type": kind, "max_length": most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", sizes)
        if isinstance(value, dict):
            return _validate_mapping(value, handler)
        return handler(value) if len(value) <= SLICE_LENGTH else _validate_slices(value, handler)

    return WrapValidator(check)


def _validate_mapping(
    value: dict[Any, Any], handler: ValidatorFunctionWrapHandler
) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, each in value.items():
        found.update(handler({key: each}))
    return found


def _validate_slices(value: list[Any], handler: ValidatorFunctionWrapHandler) -> Any:
    found: list[Any] = []
    for start in range(0, len(value), SLICE_LENGTH):
        try:
            found += (part := handler(value[start : start + SLICE_LENGTH]))
        except ValidationError as error:
            raise ValidationError.from_exception_data(
                error.title, [_shift_error(each, start) for each in error.errors()]
            ) from None
    return type(part)(found)


def _shift_error(error: Any, start: int) -> InitErrorDetails:
    """An error of a slice, at the place that its element has in the whole."""
    index, *rest = error["loc"]
    return InitErrorDetails(
        type=error["type"],
        loc=(start + index, *rest),
        input=error["input"],
        ctx=error.get("ctx", {}),
    )
