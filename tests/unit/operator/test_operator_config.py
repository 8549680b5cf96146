"""Settings: flag before environment before default; what is wrong is named with the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_operator.config import ConfigError, OperatorConfig, parse_config


def run(*flags: str, **environ: str) -> OperatorConfig:
    return parse_config(["run", *flags], environ)


def test_defaults() -> None:
    config = run(POD_NAME="operator-0", POD_NAMESPACE="rollout")
    assert config.pod_name == "operator-0"
    assert config.lease_namespace == "rollout"
    assert config.lease_name == "rollout-operator"
    assert config.leader_elect
    assert (config.workers, config.resync_seconds, config.http_port) == (16, 300, 8080)
    assert config.watch_namespaces == ()
    assert config.own_service_account() is None
    assert config.engine_defaults("hf").image is None


def test_a_flag_goes_before_the_environment() -> None:
    environ = {"ROLLOUT_OPERATOR_WORKERS": "4", "ROLLOUT_OPERATOR_HTTP_PORT": "9"}
    config = run("--workers=8", **environ)
    assert (config.workers, config.http_port) == (8, 9)


def test_namespaces_account_and_switch() -> None:
    config = run(
        "--watch-namespaces= a, b,",
        "--service-account=operator",
        "--no-leader-elect",
        "--log-level=debug",
        POD_NAMESPACE="rollout",
    )
    assert config.watch_namespaces == ("a", "b")
    assert config.own_service_account() == ("rollout", "operator")
    assert not config.leader_elect
    assert config.log_level == "DEBUG"
    assert not run(ROLLOUT_OPERATOR_LEADER_ELECT="false").leader_elect


def test_the_class_is_a_name() -> None:
    assert run().operator_class == ""
    assert run("--class=blue").operator_class == "blue"
    assert run(ROLLOUT_OPERATOR_CLASS="blue").operator_class == "blue"
    with pytest.raises(ConfigError, match=r"--class: .*given: 'Blue!'"):
        run("--class=Blue!")


def test_the_file_gives_the_engines_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        """
engines:
  hf:
    image: worker-hf:1
    imagePullPolicy: IfNotPresent
    env: [{name: A, value: b}]
    podTemplate: {nodeSelector: {gpu: "no"}}
"""
    )
    engine = run(f"--config={path}").engine_defaults("hf")
    assert engine.image == "worker-hf:1"
    assert engine.image_pull_policy == "IfNotPresent"
    assert engine.env == ({"name": "A", "value": "b"},)
    assert engine.pod_template == {"nodeSelector": {"gpu": "no"}}


def test_an_empty_file_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("")
    assert run(f"--config={path}").engines == {}


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--workers=many", r"--workers: .*valid integer.*\(given: 'many'\)"),
        ("--workers=0", r"--workers: .*greater than or equal to 1"),
        ("--http-port=70000", r"--http-port: .*65535"),
        ("--resync-seconds=1", r"--resync-seconds: .*greater than or equal to 5"),
        ("--log-format=xml", r"--log-format: .*'json' or 'text'"),
        ("--log-level=loud", r"--log-level: .*'DEBUG'"),
        ("--lease-name=", r"--lease-name: .*at least 1 character"),
    ],
)
def test_a_wrong_value_is_named(flag: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run(flag)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("engines: {hf: {imagee: x}}", r"engines\.hf\.imagee: unknown: correct its name"),
        ("engines: {tgi: {image: x}}", r"engines\.tgi.*'hf', 'vllm' or 'sglang'"),
        ("engines: {hf: {imagePullPolicy: Often}}", r"engines\.hf\.imagePullPolicy: .*'Always'"),
        ("replicas: 2", r"replicas: unknown: correct its name"),
        ("- a", r"the file: Input should be a valid dictionary"),
        ("a: [", r"is not valid YAML: "),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=sentence) as error:
        run(f"--config={path}")
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match="--config: can't read /none"):
        run("--config=/none")
