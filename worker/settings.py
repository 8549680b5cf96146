"""Settings of `rollout-worker serve`: flags, their environment variables, and what fits together.

Every flag `--some-name` can be given as `ROLLOUT_SOME_NAME`; a flag wins. `FLAGS` is the one list,
`parse` the one place that checks values: everything after it trusts them.
"""

from __future__ import annotations

import argparse
import ipaddress
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

from .engine import ENGINES
from .schemas import LogprobsOf

ENV_PREFIX = "ROLLOUT_"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
POOL_WEIGHTS_ROOTS = "/rollout/model:/rollout/weights"
"""Where the operator mounts the model and the weights' volume."""
RESTART_DELAYS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

AuthMode = Literal["none", "token", "kubernetes"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]


class BadSettings(ValueError):
    """A flag or variable that can't be used; the text names it and the fix."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked settings of one worker process."""

    engine: str
    model: str
    model_revision: str | None
    served_name: str
    dtype: Dtype
    device: Device
    max_length: int | None
    data_host: str
    data_port: int
    control_host: str
    control_port: int
    auth: AuthMode
    auth_token_file: Path | None
    logprobs: LogprobsOf
    pool: str | None
    namespace: str | None
    weights_roots: tuple[Path, ...]
    drain_seconds: float
    shutdown_grace: float
    start_timeout: float
    restart_delays: tuple[float, ...]
    max_queue: int
    max_batch_tokens: int | None
    spill_dir: Path | None
    engine_arg: tuple[str, ...]
    log_level: str
    log_format: str
    kube_api_url: str | None
    kube_ca: Path
    kube_token_file: Path

    @property
    def in_pool(self) -> bool:
        """Whether an operator owns this worker: it starts fenced."""
        return self.pool is not None

    @property
    def audience(self) -> str:
        """Audience that tokens must be made for; as `rollout_operator.names.audience`."""
        return f"rollout.dev/{self.namespace}/{self.pool}"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag: its name without dashes, how text becomes a value, its default and meaning."""

    name: str
    read: Callable[[str], Any]
    default: Any
    help: str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    repeated: bool = False
    hidden: bool = False

    @property
    def field(self) -> str:
        """Name of the field in `Settings`."""
        return self.name.replace("-", "_")

    @property
    def env(self) -> str:
        """Name of the environment variable."""
        return ENV_PREFIX + self.field.upper()

    @property
    def shown(self) -> str:
        """The default as one would type it; empty if there is none."""
        if isinstance(self.default, tuple):
            return ",".join(f"{value:g}" for value in self.default)
        return "" if self.default is None else str(self.default)


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise ValueError("a port is between 0 (any free one) and 65535")
    return port


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86400:
        raise ValueError("seconds between 0 and 86400")
    return value


def _delays(text: str) -> tuple[float, ...]:
    try:
        return tuple(_seconds(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"seconds between 0 and 86400 with commas between: {error}") from error


def _name(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


FLAGS: tuple[Flag, ...] = (
    Flag("engine", str, "hf", "inference software", ENGINES),
    Flag(
        "model",
        _name,
        None,
        "folder of the checkpoint, or a repository of the Hugging Face hub (required)",
        metavar="PATH",
    ),
    Flag("model-revision", _name, None, "commit, tag or branch of that repository"),
    Flag("served-name", _name, None, "name for clients; default: the folder's", metavar="NAME"),
    Flag("dtype", str, "auto", "of the weights; auto: the model's", get_args(Dtype)),
    Flag("device", str, "auto", "where the engine runs", get_args(Device)),
    Flag("max-length", _positive, None, "most tokens of prompt and answer; default: the model's"),
    Flag("data-host", _name, "0.0.0.0", "address of the data port"),
    Flag("data-port", _port, 8000, "generate, health, readiness, metrics"),
    Flag("control-host", _name, "0.0.0.0", "address of the control port"),
    Flag("control-port", _port, 8001, "state, pause, sleep, weights"),
    Flag("auth", str, "token", "who may use the control port", ("none", "token", "kubernetes")),
    Flag("auth-token-file", Path, None, "file with the bearer token of --auth token"),
    Flag("logprobs", str, "sampling", "kind that requests get by default", ("sampling", "raw")),
    Flag("pool", _name, None, "RolloutReplica that this worker belongs to: it starts fenced"),
    Flag("namespace", _name, None, "namespace of the pool; default: the service account's"),
    Flag(
        "weights-roots",
        str,
        None,
        "folders, separated by colons, that staged paths must be below besides the model; relative"
        f" paths resolve below the last one. Default: {POOL_WEIGHTS_ROOTS} in a pool, else any",
        metavar="PATHS",
    ),
    Flag("drain-seconds", _seconds, 30.0, "what running requests get at SIGTERM"),
    Flag("shutdown-grace", _seconds, 5.0, "how long to serve on after SIGTERM while not ready"),
    Flag("start-timeout", _seconds, 3600.0, "longest time for loading the model, in seconds"),
    Flag(
        "restart-delays",
        _delays,
        RESTART_DELAYS,
        "waits before a dead engine is started again: after its first death, its second and so on,"
        " the last one from then on; starts over once an engine lived for 10 minutes",
        metavar="SECONDS,…",
    ),
    Flag("max-queue", _positive, 1024, "waiting outputs beyond which requests get 429"),
    Flag("max-batch-tokens", _positive, None, "bound of the KV cache, in tokens"),
    Flag("spill-dir", Path, None, "folder for weights that sleep gives back; default: $TMPDIR"),
    Flag(
        "engine-arg",
        str,
        (),
        "one of the engine's own flags, repeatable; the variable holds shell words",
        repeated=True,
        metavar="ARG",
    ),
    Flag("log-level", str, "info", "least severity", ("debug", "info", "warning", "error")),
    Flag("log-format", str, "json", "json or text", ("json", "text")),
    Flag("kube-api-url", str, None, "URL of the Kubernetes API; default: in-cluster", hidden=True),
    Flag("kube-ca", Path, SERVICE_ACCOUNT / "ca.crt", "CA of the Kubernetes API", hidden=True),
    Flag(
        "kube-token-file", Path, SERVICE_ACCOUNT / "token", "token for the API", hidden=True
    ),
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags; values stay text so that flag and variable take the same way."""
    for flag in FLAGS:
        default = f" (default: {flag.shown})" if flag.shown else ""
        parser.add_argument(
            f"--{flag.name}",
            choices=flag.choices,
            metavar=flag.metavar or (None if flag.choices else "VALUE"),
            action="append" if flag.repeated else "store",
            help=argparse.SUPPRESS if flag.hidden else f"{flag.help}{default} [{flag.env}]",
        )


def parse(given: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Return checked settings of flags and environment.

    Raises:
        BadSettings: names the flag or variable and the fix.
    """
    values = {flag.field: _value(flag, getattr(given, flag.field), environ) for flag in FLAGS}
    if values["model"] is None:
        raise BadSettings(
            "give --model PATH (or ROLLOUT_MODEL): the checkpoint's folder or repository"
        )
    values["served_name"] = values["served_name"] or Path(values["model"]).name or "model"
    values["namespace"] = values["namespace"] or _own_namespace()
    values["weights_roots"] = _roots(values["weights_roots"], in_pool=values["pool"] is not None)
    settings = Settings(**{field.name: values[field.name] for field in fields(Settings)})
    _check_auth(settings)
    return settings


def _value(flag: Flag, given: str | Sequence[str] | None, environ: Mapping[str, str]) -> Any:
    if flag.repeated:
        if given is not None:
            return tuple(given)
        try:
            return tuple(shlex.split(environ.get(flag.env, "")))
        except ValueError as error:
            raise BadSettings(f"{flag.env} holds no shell words: {error}") from error
    # An empty variable is the usual way to unset one in a manifest.
    text, source = (given, f"--{flag.name}") if given is not None else (None, flag.env)
    if text is None:
        text = environ.get(flag.env) or None
    if text is None:
        return flag.default
    if flag.choices is not None and text not in flag.choices:
        raise BadSettings(f"{source} is {text!r}: choose one of {', '.join(flag.choices)}")
    try:
        return flag.read(cast(str, text))
    except ValueError as error:
        raise BadSettings(f"{source} is {text!r}: {error}") from error


def _own_namespace() -> str | None:
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text().strip() or None
    except OSError:
        return None


def _roots(text: str | None, *, in_pool: bool) -> tuple[Path, ...]:
    if text is None:
        text = POOL_WEIGHTS_ROOTS if in_pool else ""
    roots = tuple(Path(part) for part in text.split(":") if part)
    for root in roots:
        if not root.is_absolute():
            raise BadSettings(f"--weights-roots has {str(root)!r}: give absolute paths")
    return roots


def _check_auth(settings: Settings) -> None:
    if settings.auth == "none" and not is_loopback(settings.control_host):
        raise BadSettings(
            f"--auth none would open the control port on {settings.control_host}: add"
            " --control-host 127.0.0.1, or use --auth token or --auth kubernetes"
        )
    if settings.auth == "token" and settings.auth_token_file is None:
        raise BadSettings(
            "--auth token needs --auth-token-file FILE; for a worker on this machine only, use"
            " --auth none --control-host 127.0.0.1"
        )
    if settings.pool is not None and settings.namespace is None:
        raise BadSettings("--pool needs --namespace (or ROLLOUT_NAMESPACE)")
    if settings.auth == "kubernetes" and settings.pool is None:
        raise BadSettings(
            "--auth kubernetes needs --pool and --namespace: tokens are made for one pool"
        )


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
