"""Making an engine by its name."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from rollout_worker.engine import EngineError
from rollout_worker.engines import EngineOptions, create_engine


class Imported(Exception):
    """Raised in place of the import of an engine."""

    def __init__(self) -> None:
        self.collecting = gc.isenabled()


class Gate:
    """Ends the import of engines before torch is touched."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.startswith("rollout_worker.engines.") and name.endswith("_engine"):
            raise Imported


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang"])
def test_nothing_is_collected_while_an_engine_is_imported(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.delitem(
        sys.modules, f"rollout_worker.engines.{engine}.{engine}_engine", raising=False
    )
    monkeypatch.setattr(sys, "meta_path", [Gate(), *sys.meta_path])
    with pytest.raises(Imported) as caught:
        create_engine(engine, EngineOptions(Path("model")))
    assert not caught.value.collecting
    assert gc.isenabled()


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(EngineError, match="engine 'none' is unknown: use one of hf"):
        create_engine("none", EngineOptions(Path("model")))
