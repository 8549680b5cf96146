"""What equal models have in common is kept once: thousands of pools and workers say mostly the same."""

from __future__ import annotations

from functools import lru_cache

from pydantic import BaseModel


@lru_cache(maxsize=4096)
def _shared_names(names: frozenset[str]) -> set[str]:
    return set(names)


def share_field_names(model: BaseModel) -> None:
    """Let a frozen model, and all that are in it, have the sets of their fields' names in common with others.

    Each model has one of its own otherwise, of up to 2 KiB, which is more than its values take.
    """
    names = _shared_names(frozenset(model.model_fields_set))
    object.__setattr__(model, "__pydantic_fields_set__", names)
    for value in vars(model).values():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, BaseModel):
                share_field_names(each)
