"""Values that are kept while they are used, up to a size: pictures, what engines compute of them, compiled grammars."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class RecentValues(Generic[K, V]):
    """Values that were used lately, up to a sum of their sizes, such as bytes; safe to use from several threads."""

    def __init__(self, most: int, size_of: Callable[[V], int]) -> None:
        self._most, self._size_of = most, size_of
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def find_or_make(self, key: K, make: Callable[[], V]) -> V:
        """Return the value of a key; makes it if it is not kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        value = make()
        with self._lock:
            if key not in self._kept:
                self._kept[key] = value
                self.nbytes += self._size_of(value)
            while self.nbytes > self._most and len(self._kept) > 1:
                self.nbytes -= self._size_of(self._kept.popitem(last=False)[1])
        return value

    def use_values(self, keys: Iterable[K]) -> set[K]:
        """Mark values as used, in this order; return the keys of those that are not kept."""
        missing = set()
        with self._lock:
            for key in keys:
                if key in self._kept:
                    self._kept.move_to_end(key)
                else:
                    missing.add(key)
        return missing

    def value_of(self, key: K) -> V:
        """Return a value that is kept."""
        with self._lock:
            return self._kept[key]

    def drop_values(self, keeps: Callable[[K], bool] = lambda key: False) -> None:
        """Drop the values of all keys for which `keeps` is false."""
        with self._lock:
            for key in [each for each in self._kept if not keeps(each)]:
                self.nbytes -= self._size_of(self._kept.pop(key))
