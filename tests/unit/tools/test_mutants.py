"""What `make mutants` gives to mutmut."""

from __future__ import annotations

import tomllib
from pathlib import Path

import mutants

ROOT = Path(__file__).parents[3]
MODULE = Path("operator/core/replicas/pod_planning.py")


def test_a_module_is_held_by_the_tests_of_its_folder_or_of_one_above() -> None:
    folders = ["tests/unit/operator/core", "tests/process/operator/core"]
    assert mutants.tests_of(MODULE) == [each for each in folders if (ROOT / each).is_dir()]
    inner = Path("operator/core/no_such_folder/module.py")
    assert mutants.tests_of(inner) == mutants.tests_of(MODULE)


def test_the_settings_are_toml_and_name_the_module_as_it_is_imported() -> None:
    settings = tomllib.loads(mutants.settings_of(MODULE, ["tests/unit"]))["tool"]["mutmut"]
    [module] = settings["only_mutate"]
    assert (ROOT / module).samefile(ROOT / MODULE)
    assert all(
        (ROOT / path).exists() for path in (*settings["source_paths"], *settings["also_copy"])
    )
