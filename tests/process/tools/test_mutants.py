"""The table of `make mutants`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import mutants

ROOT = Path(__file__).parents[3]


def test_the_table_names_files_that_exist() -> None:
    for module, tests in mutants.read_table().items():
        assert tests, module
        for path in (module, *tests):
            assert (ROOT / path).is_file(), path


def test_the_settings_are_toml_and_name_the_module_as_it_is_imported() -> None:
    text = mutants.settings_of("operator/core/pod_planning.py", ["tests/unit/operator"])
    settings = tomllib.loads(text)["tool"]["mutmut"]
    [module] = settings["only_mutate"]
    assert (ROOT / module).samefile(ROOT / "operator/core/pod_planning.py")
    assert all(
        (ROOT / path).exists() for path in (*settings["source_paths"], *settings["also_copy"])
    )
