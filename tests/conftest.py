"""Marks each test by the folder it lives in, so that `-m` selects a tier."""

from pathlib import Path

import pytest

TIERS = {"unit", "api", "chart", "engine", "cluster", "scale"}
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tier = item.path.relative_to(HERE).parts[0]
        if tier in TIERS:
            item.add_marker(getattr(pytest.mark, tier))
