"""What images that are built here get of this machine's settings."""

from __future__ import annotations

import buildah


def test_settings_of_pip_reach_a_build_with_all_their_values() -> None:
    listed = (
        ":env:.retries='7'\n"
        "global.extra-index-url='\\nhttps://a.example/simple\\nhttps://b.example/simple?x=1'\n"
        "global.retries='3'\n"
    )
    assert buildah.read_settings(listed) == {
        "extra-index-url": "https://a.example/simple https://b.example/simple?x=1",
        "retries": "7",
    }
