import asyncio
from pathlib import Path

import pytest

from rollout_common.wire.problems import ProblemError
from rollout_worker.ports.callers.auth import (
    CONTROL_WORKER,
    SEE_STATE,
    SharedToken,
    read_bearer_token,
)
from rollout_worker.settings import InvalidSettings


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    return file


async def test_the_token_of_the_file_may_do_everything(secret: Path) -> None:
    token = SharedToken(secret)
    for right in (SEE_STATE, CONTROL_WORKER):
        assert await token.check_caller("Bearer s3cret", right) == "token"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic s3cret", "s3cret"]
)
async def test_anything_else_is_nobody(secret: Path, header: str | None) -> None:
    with pytest.raises(ProblemError) as refused:
        await SharedToken(secret).check_caller(header, SEE_STATE)
    assert refused.value.problem.status == 401
    assert "s3cret" not in refused.value.problem.detail


@pytest.fixture
def rotated(secret: Path) -> SharedToken:
    token = SharedToken(secret)
    secret.write_text("newer")
    return token


async def test_a_rotated_token_counts_at_once(rotated: SharedToken) -> None:
    token = rotated
    assert await token.check_caller("Bearer newer", SEE_STATE) == "token"
    with pytest.raises(ProblemError):
        await token.check_caller("Bearer s3cret", SEE_STATE)


@pytest.mark.parametrize(("damage", "status"), [("emptied", 401), ("removed", 503)])
def test_without_a_secret_nothing_opens(secret: Path, damage: str, status: int) -> None:
    token = SharedToken(secret)
    if damage == "emptied":
        secret.write_text("")
    else:
        secret.unlink()
    with pytest.raises(ProblemError) as refused:
        asyncio.run(token.check_caller("Bearer s3cret", SEE_STATE))
    assert refused.value.problem.status == status


def test_start_needs_a_usable_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="can't be read"):
        SharedToken(tmp_path / "none")
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(InvalidSettings, match="is empty"):
        SharedToken(tmp_path / "empty")


@pytest.mark.parametrize(
    "secret",
    ["s3cret".encode("utf-16"), b"\xef\xbb\xbfs3cret\r\n", b"\x00\x9f\x92\x96", b"one\ntwo"],
    ids=["PowerShell's >", "a BOM", "random bytes", "two lines"],
)
def test_a_secret_that_no_header_carries_is_told_at_the_start(
    tmp_path: Path, secret: bytes
) -> None:
    (tmp_path / "token").write_bytes(secret)
    with pytest.raises(InvalidSettings, match="one line of ASCII"):
        SharedToken(tmp_path / "token")


def test_the_scheme_is_case_insensitive() -> None:
    assert read_bearer_token("bearer  abc ") == "abc"
