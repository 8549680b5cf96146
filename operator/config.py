"""The operator's settings: flags, else environment `ROLLOUT_OPERATOR_<FLAG>`, else defaults.

Defaults of the engines (image, environment, pod template) come from a YAML file, which the chart
mounts. A wrong setting ends the process with one sentence and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

PREFIX = "ROLLOUT_OPERATOR_"
DEFAULT_FILE = Path("/etc/rollout/config.yaml")
ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the kubelet puts the credentials of a pod."""

LogFormat = Literal["json", "text"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
M = TypeVar("M", bound=BaseModel)


class ConfigError(Exception):
    """A setting is wrong; the message is one sentence that names it and the fix."""


class EngineDefaults(BaseModel):
    """What the operator's file says for one type of engine; a pool's spec goes first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str | None = Field(default=None, min_length=1)
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, alias="imagePullPolicy"
    )
    pod_template: Mapping[str, Any] = Field(default_factory=dict, alias="podTemplate")
    env: tuple[Mapping[str, Any], ...] = ()


class ConfigFile(BaseModel):
    """The file of `--config`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engines: Mapping[Literal["hf", "vllm", "sglang"], EngineDefaults] = Field(default_factory=dict)


class Config(BaseModel):
    """All settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    watch_namespaces: tuple[str, ...] = ()
    leader_elect: bool = True
    lease_name: str = Field(default="rollout-operator", min_length=1, max_length=253)
    lease_namespace: str = Field(default="default", min_length=1)
    http_host: str = "0.0.0.0"  # probes and Prometheus come from other machines
    http_port: int = Field(default=8080, ge=0, le=65535)
    service_account: str | None = Field(default=None, min_length=1)
    workers: int = Field(default=16, ge=1, le=256)
    resync_seconds: Annotated[float, Field(ge=5, le=86400)] = 300.0
    log_level: LogLevel = "INFO"
    log_format: LogFormat = "json"
    pod_name: str = "rollout-operator"
    engines: Mapping[str, EngineDefaults] = Field(default_factory=dict)

    def engine(self, kind: str) -> EngineDefaults:
        """Return the defaults for a type of engine."""
        return self.engines.get(kind, EngineDefaults())

    def account(self) -> tuple[str, str] | None:
        """Return (namespace, name) of our own service account, if it was named."""
        return (self.lease_namespace, self.service_account) if self.service_account else None


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Config:
    """Return the settings of `rollout-operator run`.

    Raises:
        ConfigError: A setting is wrong.
        SystemExit: By argparse, for an unknown flag (2) or `--help` (0).
    """
    given = vars(_parser().parse_args(argv))
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name == "command":
            continue
        value = environ.get(PREFIX + name.upper()) if value is None else value
        if value is not None:
            values[name] = value
    path = values.pop("config", None)
    values["engines"] = _read_file(path).engines
    values.setdefault("pod_name", environ.get("POD_NAME") or socket.gethostname())
    namespace = environ.get("POD_NAMESPACE") or own_namespace() or "default"
    values.setdefault("lease_namespace", namespace)
    watched = values.get("watch_namespaces", "")
    values["watch_namespaces"] = tuple(n.strip() for n in watched.split(",") if n.strip())
    values["log_level"] = str(values.get("log_level", "INFO")).upper()
    return _validated(Config, values, "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollout-operator",
        description="Runs pools of rollout workers. Each flag may be given as environment "
        f"variable {PREFIX}<FLAG> instead.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the operator until it is told to stop")
    flags = {
        "--watch-namespaces": "comma-separated; empty: all",
        "--lease-name": "name of the Lease for leader election",
        "--lease-namespace": "namespace of Lease and service account (default: the pod's own)",
        "--http-host": "address of metrics and probes",
        "--http-port": "port of metrics and probes; 0: any free one",
        "--config": f"YAML file with the engines' defaults (default: {DEFAULT_FILE}, if there)",
        "--service-account": "our own account, to mint the tokens that workers ask for",
        "--workers": "how many pools are reconciled at once",
        "--resync-seconds": "how often everything is listed again",
        "--log-level": "DEBUG, INFO, WARNING or ERROR",
        "--log-format": "json or text",
        "--pod-name": "our name in the Lease and in events (default: POD_NAME)",
    }
    for flag, text in flags.items():
        run.add_argument(flag, help=text)
    run.add_argument(
        "--leader-elect",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="hold a Lease while running (default); --no-leader-elect only where one runs for sure",
    )
    return parser


def _read_file(path: str | None) -> ConfigFile:
    if path is None and not DEFAULT_FILE.exists():
        return ConfigFile()
    where = Path(path) if path else DEFAULT_FILE
    try:
        content = yaml.safe_load(where.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {where} can't be read: {error}") from error
    except yaml.YAMLError as error:
        flat = " ".join(str(error).split())
        raise ConfigError(f"--config: {where} is no YAML: {flat}") from error
    return _validated(ConfigFile, content or {}, f"--config {where}: ")


def _validated(model: type[M], values: object, where: str) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"]) or "the file"
        name = path if where else "--" + path.replace("_", "-")
        given = "" if first["type"] == "missing" else f" (given: {first['input']!r})"
        unknown = first["type"] == "extra_forbidden"
        wrong = "unknown: correct its name or remove it" if unknown else first["msg"]
        raise ConfigError(f"{where}{name}: {wrong}{given}") from error


def own_namespace() -> str | None:
    """Return the namespace of the pod that we run in, if we do."""
    try:
        return (ACCOUNT_DIR / "namespace").read_text().strip() or None
    except OSError:
        return None
