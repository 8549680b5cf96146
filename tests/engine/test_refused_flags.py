"""The tables of refused flags against the parsers of the engines that are installed."""

from __future__ import annotations

import json
import subprocess

import pytest

from engine_kinds import KINDS
from rollout_worker.engines.sglang import refused as of_sglang
from rollout_worker.engines.vllm import refused as of_vllm

FLAGS = {
    "vllm": """
import json
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser(add_help=False)
AsyncEngineArgs.add_cli_args(parser)
print(json.dumps([action.option_strings for action in parser._actions]))
""",
    "sglang": """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(add_help=False)
ServerArgs.add_cli_args(parser)
print(json.dumps([action.option_strings for action in parser._actions]))
""",
}
OTHERWISE = """
import json
from rollout_worker.engine import EngineError
from rollout_worker.engines.vllm import settings

def refusal(*args):
    try:
        settings.parse(args)
    except EngineError as error:
        return str(error)

print(json.dumps([refusal(*args) for args in [
    ("--no-enable-cumem-allocator",), ("-dpn", "1"), ("--eplb-config.window_size=5",),
]]))
print(json.dumps(sorted(settings.parse(("-tp", "2", "--max-num-seqs", "8")).given)))
"""


def said(engine: str, script: str) -> list[str]:
    """Return the last lines of a script in the engine's own environment."""
    run = subprocess.run(
        [str(KINDS[engine].python), "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()


def flags_of(engine: str) -> list[list[str]]:
    names: list[list[str]] = json.loads(said(engine, FLAGS[engine])[-1])
    return names


def test_every_refused_flag_is_one_of_vllms() -> None:
    known = {name for names in flags_of("vllm") for name in names}
    # vLLM's parser takes --config before it looks at its flags.
    assert set(of_vllm.REFUSED) - known == {"--config"}


def test_every_refused_flag_is_one_of_sglangs_with_all_its_names() -> None:
    flags, refused = flags_of("sglang"), set(of_sglang.REFUSED)
    known = {name for names in flags for name in names}
    assert refused <= known
    half = [names for names in flags if refused & set(names) and not set(names) <= refused]
    assert half == [], "another name of a refused flag"
    taken = {name for name in known - refused for each in refused if each.startswith(name)}
    assert taken == set(), "would be taken for an abbreviation of a refused one"


def test_other_spellings_of_vllms_flags_are_refused_and_known() -> None:
    *_, refusals, given = said("vllm", OTHERWISE)
    for flag, why in zip(
        ("--enable-cumem-allocator", "--data-parallel-rank", "--eplb-config"),
        json.loads(refusals),
        strict=True,
    ):
        assert why is not None, flag
        assert f"{flag} can't be given: " in why
    assert json.loads(given) == ["max_num_seqs", "tensor_parallel_size"]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
