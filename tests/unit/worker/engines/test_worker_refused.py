"""The flags of engines that are refused: as the documents tell them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_worker.engine import EngineError
from rollout_worker.engines.sglang import settings as sglang
from rollout_worker.engines.vllm import settings as vllm

DOCS = Path(__file__).parents[4] / "docs" / "engines.md"


def table(refused: dict[str, str]) -> str:
    """Return the rows of the documents' table, one for each reason."""
    flags: dict[str, list[str]] = {}
    for flag, why in refused.items():
        flags.setdefault(why, []).append(f"`{flag}`")
    return "\n".join(f"| {', '.join(names)} | {why} |" for why, names in flags.items())


@pytest.mark.parametrize(
    "refused", [vllm.REFUSED_FLAGS, sglang.REFUSED_FLAGS], ids=["vllm", "sglang"]
)
def test_the_documents_have_the_table(refused: dict[str, str]) -> None:
    assert table(refused) in DOCS.read_text()


@pytest.mark.parametrize("flag", vllm.REFUSED_FLAGS)
def test_every_flag_of_vllms_table_is_refused_in_each_spelling(flag: str) -> None:
    for spelled in (flag, f"{flag}=x", f"{flag}.key=x", flag[:2] + flag[2:].replace("-", "_")):
        with pytest.raises(EngineError, match=f"{flag} can't be given: "):
            vllm.parse_flags((spelled, "x"))


@pytest.mark.parametrize("flag", sglang.REFUSED_FLAGS)
def test_every_flag_of_sglangs_table_is_refused_in_each_spelling(flag: str) -> None:
    for spelled in (flag, f"{flag}=x", flag[:-1]):
        with pytest.raises(EngineError, match=r"engine\.args of the sglang engine: --"):
            sglang.parse_flags((spelled, "x"))
