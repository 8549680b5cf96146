"""The operator's settings: flags, else environment `ROLLOUT_OPERATOR_<FLAG>`, else defaults.

Engine defaults (image, environment, pod template) come from a YAML file, which the chart mounts. A
wrong setting ends the process with one sentence and exit code 2.
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

from rollout_common.kube.access import SERVICE_ACCOUNT_DIR
from rollout_common.listening_sockets import EVERY_ADDRESS

from .api.gangs import GangScheduler
from .api.names import CONTROL_TLS_NAME
from .settings import MAX_SHARDS

ENV_PREFIX = "ROLLOUT_OPERATOR_"
DEFAULT_CONFIG_FILE = Path("/etc/rollout/config.yaml")

LogFormat = Literal["json", "text"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
M = TypeVar("M", bound=BaseModel)


class ConfigError(Exception):
    """A setting is wrong; the message is one sentence that names it and the fix."""


class EngineDefaults(BaseModel):
    """What the operator's file says for one type of engine; a pool's spec takes precedence."""

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


class OperatorConfig(BaseModel):
    """All settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    watch_namespaces: tuple[str, ...] = ()
    leader_elect: bool = True
    lease_name: str = Field(default="rollout-operator", min_length=1, max_length=253)
    lease_namespace: str = Field(default="default", min_length=1)
    http_host: str = EVERY_ADDRESS  # probes and Prometheus come from other machines
    http_port: int = Field(default=8080, ge=0, le=65535)
    service_account: str | None = Field(default=None, min_length=1)
    control_ca_file: Path | None = None
    operator_class: str = Field(
        default="", max_length=63, pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$", alias="class"
    )
    shards: int = Field(default=1, ge=1, le=MAX_SHARDS)
    workers: int = Field(default=16, ge=1, le=256)
    resync_seconds: Annotated[float, Field(ge=5, le=86400)] = 300.0
    log_level: LogLevel = "INFO"
    log_format: LogFormat = "json"
    pod_name: str = "rollout-operator"
    turn_claim: str = Field(
        default="", max_length=253, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"
    )
    gang_scheduler: GangScheduler | None = None
    engines: Mapping[str, EngineDefaults] = Field(default_factory=dict)

    def engine_defaults(self, kind: str) -> EngineDefaults:
        """Return the defaults for a type of engine."""
        return self.engines.get(kind, EngineDefaults())

    def own_service_account(self) -> tuple[str, str] | None:
        """Return (namespace, name) of the operator's own service account, if one is set."""
        return (self.lease_namespace, self.service_account) if self.service_account else None


def parse_config(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> OperatorConfig:
    """Return the settings of `rollout-operator run`.

    Raises:
        ConfigError: A setting is wrong.
        SystemExit: By argparse, for an unknown flag (2) or `--help` (0).
    """
    given = vars(_build_parser().parse_args(argv))
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name == "command":
            continue
        value = environ.get(ENV_PREFIX + name.upper()) if value is None else value
        if value is not None:
            values[name] = value
    path = values.pop("config", None)
    values["engines"] = _read_config_file(path).engines
    values.setdefault("pod_name", environ.get("POD_NAME") or socket.gethostname())
    namespace = environ.get("POD_NAMESPACE") or own_namespace() or "default"
    values.setdefault("lease_namespace", namespace)
    watched = values.get("watch_namespaces", "")
    values["watch_namespaces"] = tuple(n.strip() for n in watched.split(",") if n.strip())
    values["log_level"] = str(values.get("log_level", "INFO")).upper()
    return _validate_model(OperatorConfig, values, "")


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollout-operator",
        description="Run pools of rollout workers. Each flag can also be set as the environment "
        f"variable {ENV_PREFIX}<FLAG>.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the operator until it is stopped")
    flags = {
        "--watch-namespaces": "namespaces to watch, comma-separated (default: all)",
        "--class": "act only on RolloutReplicas whose spec.operatorClass is this (default: only on those "
        "without one)",
        "--lease-name": "name of the Lease for leader election (default: rollout-operator)",
        "--lease-namespace": "namespace of the Lease and of the operator's service account "
        "(default: the pod's own)",
        "--http-host": "address to serve metrics and probes on (default: ::, every one, of IPv4 too)",
        "--http-port": "port to serve metrics and probes on; 0 picks a free one (default: 8080)",
        "--config": f"YAML file with engine defaults (default: {DEFAULT_CONFIG_FILE}, if it exists)",
        "--service-account": "the operator's own service account, used to mint the tokens that "
        "workers require (default: none)",
        "--control-ca-file": "file of CA certificates; the operator then calls control ports over TLS "
        f"only, and checks their certificates for the name {CONTROL_TLS_NAME} (default: no TLS)",
        "--shards": "number of shards that the pools are divided into, each led by a process of its own; "
        "must be the same for all processes (default: 1)",
        "--workers": "number of pools reconciled at once (default: 16)",
        "--resync-seconds": "seconds between full lists of the cluster (default: 300)",
        "--log-level": "minimum log level: DEBUG, INFO, WARNING or ERROR (default: INFO)",
        "--log-format": "log format: json or text (default: json)",
        "--turn-claim": "PersistentVolumeClaim with a node's lock directory, in each namespace that has "
        "colocated pools (default: none; trainer and engine may then hold memory at once)",
        "--gang-scheduler": "what starts the pods of a replica together where spec.scheduling.gang asks for "
        "it: Kueue, Volcano or SchedulerPlugins (default: the one that the cluster has)",
        "--pod-name": "name of this process in the Lease and in events (default: POD_NAME, else "
        "the host name)",
    }
    for flag, text in flags.items():
        run.add_argument(flag, help=text)
    run.add_argument(
        "--leader-elect",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="hold a Lease while running (default); use --no-leader-elect only if no other "
        "operator can be running",
    )
    return parser


def _read_config_file(path: str | None) -> ConfigFile:
    if path is None and not DEFAULT_CONFIG_FILE.exists():
        return ConfigFile()
    where = Path(path) if path else DEFAULT_CONFIG_FILE
    try:
        content = yaml.safe_load(where.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: can't read {where}: {error}") from error
    except yaml.YAMLError as error:
        flat = " ".join(str(error).split())
        raise ConfigError(f"--config: {where} is not valid YAML: {flat}") from error
    return _validate_model(ConfigFile, content or {}, f"--config {where}: ")


def _validate_model(model: type[M], values: object, where: str) -> M:
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
    """Return the namespace of the pod that this process runs in, if it does."""
    try:
        return (SERVICE_ACCOUNT_DIR / "namespace").read_text().strip() or None
    except OSError:
        return None
