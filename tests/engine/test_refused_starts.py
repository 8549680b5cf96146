"""What engines refuse before they start, as the engines that are installed see it."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest

from rollout_worker.engines.sglang import settings as of_sglang
from rollout_worker.engines.vllm import settings as of_vllm
from rollout_worker.engines.vllm.launch import SHARED_DEVICE_FLAGS
from tests.support.broken_models import DAMAGE, damage
from tests.support.engine.engine_programs import EnginePrograms
from tests.support.engine.tinymodels import script

ASKED = {
    "vllm": """
import json, os, sys
from pathlib import Path
from rollout_worker.engine import EngineError
from rollout_worker.engines import EngineOptions
from rollout_worker.engines.vllm import launch, settings
launch.prepare_environment()

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser(add_help=False)
AsyncEngineArgs.add_cli_args(parser)

def refusal(work, *args):
    try:
        work(*args)
    except EngineError as error:
        return str(error)

def start(folder):
    options = EngineOptions(model=Path(folder))
    launch.launch_vllm(options, settings.parse_flags(()), lambda _: None, lambda: False)

print(json.dumps({
    "flags": [action.option_strings for action in parser._actions],
    "refusals": [refusal(settings.parse_flags, args) for args in [
        ("--no-enable-cumem-allocator",), ("-dpn", "1"), ("--eplb-config.window_size=5",),
    ]],
    "given": sorted(settings.parse_flags(("-tp", "2", "--max-num-seqs", "8")).given),
    "starts": [refusal(start, folder) for folder in sys.argv[1:]],
    "shape": [
        os.environ.update(ROLLOUT_TENSOR="1", ROLLOUT_PIPELINE="2", ROLLOUT_DATA="1"),
        refusal(settings.parse_flags, ("-tp", "8")),
        refusal(settings.parse_flags, ("--pipeline-parallel-size=2",)),
        settings.parse_flags(()).vllm.pipeline_parallel_size,
    ][1:],
}))
""",
    "sglang": """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(add_help=False)
ServerArgs.add_cli_args(parser)
print(json.dumps({"flags": [action.option_strings for action in parser._actions]}))
""",
}


@pytest.fixture(scope="module")
def vllm(vllm_programs: EnginePrograms, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM's environment says; the starts are those with a model of heads too small and with broken folders."""
    home, maker = tmp_path_factory.mktemp("refused"), script()
    maker.make_model(home / "narrow", 1, maker.Shape(hidden=64, heads=4))
    folders = [home / "narrow"]
    for number, (name, text, _) in enumerate(DAMAGE):
        folders.append(shutil.copytree(home / "narrow", home / str(number)))
        damage(folders[-1], name, text)
    answer: dict[str, Any] = vllm_programs.read_answer(ASKED["vllm"], *folders)
    return answer


def test_every_refused_flag_is_one_of_vllms(vllm: dict[str, Any]) -> None:
    known = {name for names in vllm["flags"] for name in names}
    # vLLM's parser takes --config before it looks at its flags.
    assert set(of_vllm.REFUSED_FLAGS) - known == {"--config"}
    assert {f"--{name.replace('_', '-')}" for name in SHARED_DEVICE_FLAGS} <= known


def test_every_refused_flag_is_one_of_sglangs_with_all_its_names(
    sglang_programs: EnginePrograms,
) -> None:
    flags = sglang_programs.read_answer(ASKED["sglang"])["flags"]
    refused = set(of_sglang.REFUSED_FLAGS)
    known = {name for names in flags for name in names}
    assert refused <= known
    half = [names for names in flags if refused & set(names) and not set(names) <= refused]
    assert half == [], "another name of a refused flag"
    taken = {name for name in known - refused for each in refused if each.startswith(name)}
    assert taken == set(), "would be taken for an abbreviation of a refused one"


def test_other_spellings_of_vllms_flags_are_refused_and_known(vllm: dict[str, Any]) -> None:
    for flag, why in zip(
        ("--enable-cumem-allocator", "--data-parallel-rank", "--eplb-config"),
        vllm["refusals"],
        strict=True,
    ):
        assert why is not None, flag
        assert f"{flag} can't be given: " in why
    assert vllm["given"] == ["max_num_seqs", "tensor_parallel_size"]


def test_flags_that_contradict_the_pools_ranks_are_refused(vllm: dict[str, Any]) -> None:
    other, same, taken = vllm["shape"]
    assert "--tensor-parallel-size 8 contradicts spec.parallelism.tensor, " in other
    assert "which is 1: remove the flag, or create a pool with parallelism: {tensor: 8}" in other
    assert (same, taken) == (None, 2)


def test_a_head_size_that_vllm_has_no_kernel_for_is_refused_before_the_start(
    vllm: dict[str, Any],
) -> None:
    """It would start healthy and die at the first request."""
    assert "head_dim 16" in vllm["starts"][0]
    assert "hf engine" in vllm["starts"][0]


def test_a_broken_model_folder_is_told_in_the_words_of_all_engines(vllm: dict[str, Any]) -> None:
    for (_, _, said), why in zip(DAMAGE, vllm["starts"][1:], strict=True):
        assert re.search(said, why or ""), (said, why)
