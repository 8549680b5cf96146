import argparse
import re
import resource
import socket
import tempfile
from pathlib import Path

import pytest

from rollout_operator.api import names
from rollout_worker import settings as worker_settings
from rollout_worker.__main__ import main
from rollout_worker.ports.callers.kubernetes_auth import API_GROUP, RESOURCE
from rollout_worker.settings import (
    FLAGS,
    InvalidSettings,
    WorkerSettings,
    add_flags,
    parse_settings,
)

ALONE = ["--model", "/models/tiny", "--auth", "none", "--control-host", "127.0.0.1"]
TURN = [*ALONE, "--turn-directory", "/turn", "--turn-devices"]


def settings(arguments: list[str], environ: dict[str, str] | None = None) -> WorkerSettings:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parse_settings(parser.parse_args(arguments), environ or {})


def test_defaults() -> None:
    found = settings(ALONE)
    assert (found.engine, found.served_name, found.dtype) == ("hf", "tiny", "auto")
    assert (found.data_port, found.control_port, found.data_host) == (8000, 8001, "::")
    assert (found.drain_seconds, found.shutdown_grace, found.max_queue) == (30, 5, 1024)
    assert (found.logprobs, found.pool, found.weights_roots) == ("sampling", None, ())
    assert found.restart_delays == (1, 2, 5, 10, 30, 60)


def test_every_flag_has_a_variable_and_the_flag_wins() -> None:
    for flag in FLAGS:
        assert flag.variable_name == "ROLLOUT_" + flag.name.upper().replace("-", "_")
    environ = {"ROLLOUT_DATA_PORT": "9000", "ROLLOUT_CONTROL_PORT": "9001", "ROLLOUT_DTYPE": ""}
    found = settings([*ALONE, "--control-port", "9002"], environ)
    assert (found.data_port, found.control_port, found.dtype) == (9000, 9002, "auto")


def test_parsers_may_be_named_among_the_engines_flags() -> None:
    words = ["--a", "--tool-call-parser=hermes", "--reasoning-parser", "qwen3", "-b"]
    found = settings([*ALONE, *(f"--engine-arg={word}" for word in words)])
    assert (found.tool_call_parser, found.reasoning_parser) == ("hermes", "qwen3")
    assert found.engine_arg == ("--a", "-b")
    found = settings([*ALONE, "--tool-call-parser", "mistral", f"--engine-arg={words[1]}"])
    assert (found.tool_call_parser, found.engine_arg) == ("mistral", ())
    with pytest.raises(
        InvalidSettings, match="--reasoning-parser among the engine's flags names no"
    ):
        settings([*ALONE, "--engine-arg=--reasoning-parser"])


def test_everything_from_the_environment() -> None:
    environ = {
        "ROLLOUT_MODEL": "/m",
        "ROLLOUT_AUTH": "kubernetes",
        "ROLLOUT_POOL": "pool",
        "ROLLOUT_NAMESPACE": "ns",
        "ROLLOUT_ENGINE_ARG": "--max-batch-size 4 --attention='eager'",
    }
    found = settings([], environ)
    assert found.token_audience == "rollout.dev/ns/pool"
    assert found.pool
    assert found.engine_arg == ("--max-batch-size", "4", "--attention=eager")
    assert found.weights_roots == (Path("/rollout/model"), Path("/rollout/weights"))


def test_the_operator_uses_the_same_names() -> None:
    """Written twice, because a worker imports nothing of the operator."""
    environ = {"ROLLOUT_MODEL": "/m", "ROLLOUT_AUTH": "kubernetes", "ROLLOUT_POOL": "p"}
    found = settings([], {**environ, "ROLLOUT_NAMESPACE": "n"})
    assert found.token_audience == names.token_audience("n", "p")
    assert (found.data_port, found.control_port) == (names.DATA_PORT, names.CONTROL_PORT)
    mounts = [str(root) for root in found.weights_roots]
    assert mounts == [names.MODEL_MOUNT, names.WEIGHTS_MOUNT]
    assert (API_GROUP, RESOURCE) == (names.GROUP, names.PLURAL)


def test_engine_args_repeat() -> None:
    found = settings([*ALONE, "--engine-arg=--threads", "--engine-arg", "2"])
    assert found.engine_arg == ("--threads", "2")


def test_delays_are_a_list() -> None:
    assert settings([*ALONE, "--restart-delays", "0"]).restart_delays == (0,)
    environ = {"ROLLOUT_RESTART_DELAYS": "0.5,3"}
    assert settings(ALONE, environ).restart_delays == (0.5, 3)


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        pytest.param([], {}, "give --model PATH", id="no model"),
        pytest.param(["--model", "m", "--auth", "none"], {}, "--control-host 127.0.0.1", id="open"),
        pytest.param(["--model", "m"], {}, "needs --auth-token-file", id="no token"),
        pytest.param([*ALONE, "--data-port", "70000"], {}, "--data-port is '70000'", id="port"),
        pytest.param([*ALONE, "--max-queue", "0"], {}, "at least 1", id="queue"),
        pytest.param([*ALONE, "--drain-seconds", "-1"], {}, "between 0 and 86400", id="drain"),
        pytest.param([*ALONE, "--restart-delays", ""], {}, "comma-separated", id="no delays"),
        pytest.param([*ALONE, "--restart-delays", "1,-2"], {}, "comma-separated", id="delays"),
        pytest.param(ALONE, {"ROLLOUT_LOGPROBS": "some"}, "ROLLOUT_LOGPROBS is 'some'", id="env"),
        pytest.param(ALONE, {"ROLLOUT_ENGINE_ARG": "'"}, "ROLLOUT_ENGINE_ARG", id="words"),
        pytest.param([*ALONE, "--weights-roots", "a:b"], {}, "absolute paths", id="roots"),
        pytest.param([*ALONE, "--pool", "p"], {}, "--pool needs --namespace", id="namespace"),
        pytest.param([*ALONE, "--rank", "1"], {}, "--rank 1 is not below --nodes 1", id="rank"),
        pytest.param([*ALONE, "--rank", "-1"], {}, "at least 0", id="negative rank"),
        pytest.param([*ALONE, "--nodes", "2"], {}, "needs --leader-address HOST", id="leader"),
        pytest.param(
            [*ALONE, "--nodes", "2", "--leader-address", "10.0.0.1"],
            {},
            "must end in -0, or give --member-addresses",
            id="members",
        ),
        pytest.param(
            [*ALONE, "--nodes", "3", "--leader-address", "a-0", "--member-addresses", "b:1"],
            {},
            "names 1 workers: name each of the 2",
            id="too few members",
        ),
        pytest.param([*ALONE, "--member-addresses", "b"], {}, "'b' is not HOST:PORT", id="address"),
        pytest.param(
            [
                *("--model", "m", "--auth", "kubernetes", "--pool", "p", "--namespace", "n"),
                *("--nodes", "2", "--leader-address", "p-0-0.p-heads"),
            ],
            {},
            "needs --gang-token-file: a token of this pod, issued for 'rollout.dev/n/p'",
            id="gang token",
        ),
        pytest.param([*ALONE, "--staging-memory", "much"], {}, "a size such as 80Gi", id="size"),
        pytest.param([*ALONE, "--staging-memory", "80GiB"], {}, "such as 80Gi", id="unit"),
        pytest.param(ALONE, {"ROLLOUT_STAGING_MEMORY": "0"}, "must be more than 0", id="no size"),
        pytest.param(
            ["--model", "m", "--auth", "kubernetes"], {}, "needs --pool and --namespace", id="pool"
        ),
        pytest.param([*ALONE, "--turn-directory", "/t"], {}, "or neither", id="turn directory"),
        pytest.param([*ALONE, "--turn-devices", "a"], {}, "or neither", id="turn devices"),
        pytest.param([*TURN, "a,b,a"], {}, "names a device twice", id="device twice"),
        pytest.param([*TURN, "a,"], {}, "can't name a device", id="empty device"),
        pytest.param(
            [*ALONE, "--gang-port", "0"], {}, "between 1 and 65535: all ranks meet", id="gang port"
        ),
    ],
)
def test_what_does_not_fit_names_the_fix(
    arguments: list[str], environ: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidSettings, match=re.escape(said)):
        settings(arguments, environ)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1024", 1024),
        ("80Gi", 80 << 30),
        ("1.5Ki", 1536),
        ("2e9", 2_000_000_000),
        ("1E", 10**18),
        ("3k", 3000),
        ("1500m", 2),
    ],
)
def test_a_size_is_read_as_kubernetes_writes_it(text: str, nbytes: int) -> None:
    assert settings([*ALONE, "--staging-memory", text]).staging_memory == nbytes
    assert settings(ALONE).staging_memory is None


def test_a_folder_for_sleep_must_be_there_at_the_start(tmp_path: Path) -> None:
    assert settings([*ALONE, "--spill-dir", str(tmp_path)]).spill_dir == tmp_path
    file = tmp_path / "file"
    file.touch()
    for wrong in (file, tmp_path / "gone"):
        with pytest.raises(
            InvalidSettings, match=r"--spill-dir .* is not a folder .*spec.sleep.spill"
        ):
            settings([*ALONE, "--spill-dir", str(wrong)])


def test_a_pool_keeps_weights_where_its_pods_mount_a_folder_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_settings, "POOL_KEEP_FOLDER", tmp_path / "mounted")
    pool = [*ALONE, "--pool", "p", "--namespace", "n"]
    assert settings(pool).keep_folder is None
    (tmp_path / "mounted").mkdir()
    assert settings(pool).keep_folder == tmp_path / "mounted"
    assert settings(ALONE).keep_folder is None
    assert settings(pool, {"ROLLOUT_KEEP_FOLDER": "/other"}).keep_folder == Path("/other")


def test_without_a_temporary_folder_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a read-only root file system: engines need one."""
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is looked for once
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # no file can be written to
    try:
        with pytest.raises(InvalidSettings, match=r"mount one at /tmp, or set TMPDIR"):
            settings(ALONE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
def test_without_authentication_on_loopback_only(host: str) -> None:
    assert settings(["--model", "m", "--auth", "none", "--control-host", host]).auth == "none"


def test_bad_settings_exit_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "m", "--auth", "none"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("rollout-worker: --auth none would open the control port")


def test_help_names_every_public_flag_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for flag in FLAGS:
        assert (f"--{flag.name}" in said) is not flag.hidden
        assert (f"[{flag.variable_name}]" in said) is not flag.hidden


def test_openapi_shows_both_ports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["openapi"]) == 0
    said = capsys.readouterr().out
    assert all(f'"/v1/{route}"' in said for route in ("generate", "models", "state", "require"))


def test_the_turn_is_taken_under_the_hosts_name_unless_another_is_given() -> None:
    turn = [*TURN, "b, a"]
    assert settings(turn).turn_holder == socket.gethostname()
    assert settings([*turn, "--turn-holder", "pod-0"]).turn_holder == "pod-0"
    assert settings(turn).turn_devices == ("b", "a")
