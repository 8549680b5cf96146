"""The lines of worker and operator: one schema, for whoever collects them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_common.json_logs import WORKER_QUIET_LOGGERS, configure_logging
from rollout_operator.operator_logs import configure_logging as configure_operator

FIELDS = {"time", "level", "logger", "message"}
ERRORS = Path(__file__).parents[3] / "docs" / "operate" / "errors.md"


def configure_worker(level: str, log_format: str) -> None:
    configure_logging(level, log_format, quiet=WORKER_QUIET_LOGGERS)


Configure = Callable[[str, str], None]
PROCESSES = pytest.mark.parametrize(
    "configure", [configure_worker, configure_operator], ids=["worker", "operator"]
)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    found = list(logging.root.manager.loggerDict.values())
    levels = [(each, each.level) for each in found if isinstance(each, logging.Logger)]
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for logger, before in levels:
        logger.setLevel(before)
    for name in ("httpx", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


@PROCESSES
def test_a_line_is_one_object_with_its_extras(
    configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("info", "json")
    logger = logging.getLogger("rollout.x")
    logger.debug("not at this level")
    logger.info(
        "%d of %d ä\n", 1, 2, extra={"key": ("rl", "math"), "time": "mine", "path": Path("/w")}
    )
    [line] = lines_of(capsys)
    assert line.pop("time").endswith("Z"), "an extra takes no field's place"
    assert line == {
        "level": "info",
        "logger": "rollout.x",
        "message": "1 of 2 ä\n",
        "key": ["rl", "math"],
        "path": "/w",
    }


@PROCESSES
def test_a_traceback_is_in_the_same_line(
    configure: Configure, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("INFO", "json")
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("rollout.x").exception("failed")
    [line] = lines_of(capsys)
    assert set(line) == {*FIELDS, "traceback"}
    assert line["level"] == "error"
    assert "ValueError: bad" in line["traceback"]


@PROCESSES
def test_libraries_say_no_routine(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    configure("debug", "json")
    for level in (logging.INFO, logging.WARNING):
        logging.getLogger("httpx").log(level, "request")
    assert [line["level"] for line in lines_of(capsys)] == ["warning"]
    configure("error", "json")
    logging.getLogger("httpx").warning("request")
    assert lines_of(capsys) == []


@PROCESSES
def test_a_terminal_gets_text(configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "text")
    logging.getLogger("rollout.x").warning("look")
    assert capsys.readouterr().err.endswith(" WARNING rollout.x: look\n")


def test_what_kopf_attaches_for_itself_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    configure_operator("info", "json")
    extra = {"settings": "kopf's own", "k8s_skip": True, "k8s_ref": {}, "pool": "rl/math"}
    logging.getLogger("rollout.x").info("look", extra=extra)
    [line] = lines_of(capsys)
    assert set(line) == {*FIELDS, "pool"}


def test_the_page_of_errors_describes_every_field() -> None:
    section = ERRORS.read_text().partition("## The log lines")[2].partition("\n## ")[0]
    described = {line.split("`")[1] for line in section.splitlines() if line.startswith("| `")}
    assert {*FIELDS, "traceback"} <= described
