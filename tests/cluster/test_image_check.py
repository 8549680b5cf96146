"""hack/check_image.py on the image that the cluster's nodes run, and on a copy of it that is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import check_image
import images
from buildah import Store
from localkube.home import cache

RIGHT = images.IMAGES[1].reference
WRONG = "localhost/rollout-worker-as-root:dev"


@pytest.fixture
def store() -> Iterator[Store]:
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    images.build()
    made = Store(cache() / "buildah")
    yield made
    if made.has(WRONG):
        made.do("rmi", "--force", WRONG)


def test_the_nodes_image_starts_as_a_pod_starts_it(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_image.check(store, RIGHT) == 0
    told = capsys.readouterr().out
    for name in ("configuration", "process", "versions", "help"):
        assert f"ok   {name}" in told
    assert "PID 1, user 65532, writes to /tmp and /dev/shm only" in told


def test_an_image_of_another_user_and_entry_point_is_told(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    container = store.ask("from", "--pull-never", RIGHT).strip()
    store.do("config", "--user", "0:0", "--entrypoint", '["sh","-c","rollout-worker"]', container)
    store.do("commit", "--quiet", "--rm", container, WRONG)
    assert check_image.check(store, WRONG) == 1
    told = capsys.readouterr().out
    assert "FAIL configuration" in told
    assert "FAIL process" in told
    assert "it runs as [0, 0], not 65532" in told
