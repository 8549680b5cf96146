"""Settings of `rollout-worker serve`: flags and variables; `settings_checks` says what goes together.

Every flag `--some-name` can also be set as `ROLLOUT_SOME_NAME`; the flag wins. The fields of `WorkerSettings`
list them all, and only `parse_settings` checks values: everything after it trusts them.
"""

# ruff: noqa: RUF009  # `_flag` makes a field

from __future__ import annotations

import argparse
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any, Literal, cast, get_args

from rollout_common.listening_sockets import EVERY_ADDRESS
from rollout_common.quantities import parse_quantity_bytes
from rollout_common.turn.errors import TurnError
from rollout_common.turn.lock_files import lock_name
from rollout_common.wire import LogprobsOf

from .engine import ENGINES
from .settings_checks import InvalidSettings as InvalidSettings
from .settings_checks import check_settings

MEMORY_SCAN_SECONDS = 5.0
"""How long a scrape waits for the memory to be counted: half of Prometheus' usual time-out. Then it gets the former count."""

ENV_PREFIX = "ROLLOUT_"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
POOL_WEIGHTS_ROOTS = "/rollout/model:/rollout/weights"
"""Where the operator mounts the model and the weights volume."""
POOL_KEEP_FOLDER = Path("/rollout-kept")
"""Where a pod template may mount a folder of the node for kept versions: below /rollout the operator allows no mounts."""
RESTART_DELAYS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

AuthMode = Literal["none", "token", "kubernetes"]
WeightsTls = Literal["off", "required"]
GangFetch = Literal["needed", "all"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]

PARSER_FLAGS = {"--tool-call-parser": "tool_call_parser", "--reasoning-parser": "reasoning_parser"}
"""Flags of the engines' own servers that are the worker's here, with the settings that they set."""


@dataclass(frozen=True, slots=True)
class CommandFlag:
    """One flag: its name without dashes, how to parse its value, its default and meaning."""

    name: str
    read: Callable[[str], Any]
    default: Any
    help: str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    repeated: bool = False
    hidden: bool = False

    @property
    def field_name(self) -> str:
        """Name of the field in `WorkerSettings`."""
        return self.name.replace("-", "_")

    @property
    def variable_name(self) -> str:
        """Name of the environment variable."""
        return ENV_PREFIX + self.field_name.upper()

    @property
    def shown_default(self) -> str:
        """The default as a user would type it; empty if there is none."""
        if isinstance(self.default, tuple):
            return ",".join(f"{value:g}" for value in self.default)
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return "" if self.default is None else str(self.default)


def _whole_number(least: int, most: float, wrong: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise ValueError(wrong)
        return value

    return parse


_parse_port = _whole_number(0, 65535, "must be between 0 (any free port) and 65535")
_parse_fixed_port = _whole_number(
    1, 65535, "must be between 1 and 65535: all ranks meet at the same one"
)
_parse_positive = _whole_number(1, inf, "must be at least 1")
_parse_rank = _whole_number(0, inf, "must be at least 0")


def _parse_addresses(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(","))
    for each in found:
        host, _, port = each.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"{each!r} is not HOST:PORT")
    return found


def _parse_devices(text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(","))
    try:
        for each in found:
            lock_name(each)
    except TurnError as error:
        raise ValueError(str(error)) from error
    if len(set(found)) < len(found):
        raise ValueError("names a device twice")
    return found


def _parse_seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86400:
        raise ValueError("must be between 0 and 86400 seconds")
    return value


def _parse_delays(text: str) -> tuple[float, ...]:
    try:
        return tuple(_parse_seconds(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"must be comma-separated seconds: {error}") from error


def _parse_name(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


_METAVARS: dict[Callable[[str], Any], str] = {
    _parse_port: "PORT",
    _parse_fixed_port: "PORT",
    _parse_positive: "N",
    _parse_seconds: "SECONDS",
    _parse_delays: "SECONDS,…",
    _parse_name: "NAME",
    Path: "FILE",
}
"""The word for the value in `--help`, unless the flag has one of its own."""


def _flag(
    read: Callable[[str], Any],
    default: Any,
    meaning: str,
    choices: tuple[str, ...] | None = None,
    **more: Any,
) -> Any:
    """A field of `WorkerSettings` that the flag of the same name sets; the arguments become a `CommandFlag`."""
    flag = {"read": read, "default": default, "help": meaning, "choices": choices, **more}
    return field(metadata=flag)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Checked settings of one worker process, each with its flag."""

    # fmt: off
    engine: str = _flag(str, "hf", "inference engine", ENGINES)
    model: str = _flag(_parse_name, None,
        "folder of the checkpoint, or a repository on the Hugging Face Hub (required)", metavar="PATH")
    model_revision: str | None = _flag(_parse_name, None,
        "commit, tag or branch of the Hub repository", metavar="REVISION")
    served_name: str = _flag(_parse_name, None, "model name shown to clients; default: the folder's name")
    dtype: Dtype = _flag(str, "auto", "data type of the weights; auto: the model's", get_args(Dtype))
    device: Device = _flag(str, "auto", "device to run the engine on", get_args(Device))
    max_length: int | None = _flag(_parse_positive, None,
        "maximum tokens of prompt plus output; default: the model's maximum")
    data_host: str = _flag(_parse_name, EVERY_ADDRESS,
        "address the data port listens on; ::, every address, of IPv6 and IPv4", metavar="HOST")
    data_port: int = _flag(_parse_port, 8000, "data port: generation, health, readiness, metrics")
    data_token_file: Path | None = _flag(Path, None,
        "file with a bearer token that the data port wants for all but /health, /ready and /metrics; default: "
        "none is wanted")
    control_host: str = _flag(_parse_name, EVERY_ADDRESS,
        "address the control port listens on", metavar="HOST")
    control_port: int = _flag(_parse_port, 8001, "control port: state, pause, sleep, weights")
    weights_port: int | None = _flag(_parse_port, None,
        "port that takes pushed weights, 8002 in the operator's pods; default: none")
    weights_socket: Path | None = _flag(Path, None,
        "Unix socket that takes pushed weights as shared memory; its folder must exist", metavar="PATH")
    weights_tls: WeightsTls = _flag(str, "off",
        "required: --weights-port takes TLS alone, with the control port's certificate, and other workers are "
        "reached over TLS alone", get_args(WeightsTls))
    weights_egress: int | None = _flag(parse_quantity_bytes, None,
        "most bytes a second of weights that go out to other workers, such as 500M; default: no limit",
        metavar="SIZE")
    auth: AuthMode = _flag(str, "token",
        "how callers of the control port authenticate", ("none", "token", "kubernetes"))
    auth_token_file: Path | None = _flag(Path, None, "file with the bearer token for --auth token")
    control_tls_cert_file: Path | None = _flag(Path, None,
        "certificate (chain) of the control port, which then speaks TLS only; read again every minute")
    control_tls_key_file: Path | None = _flag(Path, None, "private key of that certificate")
    logprobs: LogprobsOf = _flag(str, "sampling", "kind of logprobs returned by default", ("sampling", "raw"))
    pool: str | None = _flag(_parse_name, None, "RolloutReplica this worker belongs to; it then starts fenced")
    namespace: str | None = _flag(_parse_name, None, "namespace of the pool; default: the service account's")
    weights_roots: tuple[Path, ...] = _flag(str, None,
        "colon-separated folders that weights may be staged from, besides the model's; relative paths are below "
        f"the last one. Default: {POOL_WEIGHTS_ROOTS} in a pool, else any folder", metavar="DIRS")
    drain_seconds: float = _flag(_parse_seconds, 30.0, "how long running requests may take to finish after SIGTERM")
    shutdown_grace: float = _flag(_parse_seconds, 5.0,
        "how long to keep serving after SIGTERM, though no longer ready")
    start_timeout: float = _flag(_parse_seconds, 3600.0, "how long the model may take to load")
    restart_delays: tuple[float, ...] = _flag(_parse_delays, RESTART_DELAYS,
        "delays before restarting a dead engine, one per consecutive failure; the last one repeats. An engine "
        "that lives for 10 minutes resets them")
    max_queue: int = _flag(_parse_positive, 1024, "maximum queued outputs; requests beyond it get 429")
    max_batch_tokens: int | None = _flag(_parse_positive, None, "size of the KV cache, in tokens")
    staging_memory: int | None = _flag(parse_quantity_bytes, None,
        "most memory for staged weights, such as 80Gi; default: what the memory limit leaves", metavar="SIZE")
    keep_folder: Path | None = _flag(Path, None,
        "folder that outlives the process, best in memory, where committed pushed weights are kept for the next "
        f"worker on this node; default: {POOL_KEEP_FOLDER} in a pool that mounts one there, else none", metavar="DIR")
    spill_dir: Path | None = _flag(Path, None,
        "folder for weights that sleep moves out of memory; default: $TMPDIR", metavar="DIR")
    engine_arg: tuple[str, ...] = _flag(str, (),
        "flag to pass to the engine, repeatable; the variable takes shell words", repeated=True, metavar="ARG")
    tool_call_parser: str | None = _flag(_parse_name, None,
        "the engine's parser of tool calls for OpenAI's routes; default: hermes if the chat template shows its format")
    reasoning_parser: str | None = _flag(_parse_name, None,
        "the engine's parser of reasoning for OpenAI's routes; default: reasoning stays text")
    nodes: int = _flag(_parse_positive, 1,
        "nodes that the engine spans, each with a worker of its own; above 1 they form a gang")
    rank: int = _flag(_parse_rank, 0, "which of these nodes this is; 0 is the head, which serves", metavar="N")
    leader_address: str | None = _flag(_parse_name, None,
        "host name or address of the head's node, for --nodes above 1", metavar="HOST")
    gang_port: int = _flag(_parse_fixed_port, 8003, "port on the head's node at which the engine's ranks meet")
    gang_fetch: GangFetch = _flag(str, "needed",
        "what a rank above 0 takes of pushed weights: what its part of the engine reads, as far as that was seen, "
        "or all", get_args(GangFetch))
    gang_token_file: Path | None = _flag(Path, None, "token that the head shows its members with --auth kubernetes")
    member_addresses: tuple[str, ...] = _flag(_parse_addresses, (),
        "comma-separated control ports of ranks 1, 2, …; default: --leader-address with their rank in place of "
        "the 0 that ends its first label, and --control-port", metavar="HOST:PORT,…")
    turn_directory: Path | None = _flag(Path, None,
        "directory of the node with a lock for each device that somebody else uses by turns with this engine",
        metavar="DIR")
    turn_devices: tuple[str, ...] = _flag(_parse_devices, (),
        "comma-separated devices of this node whose locks are the engine's turn; with --nodes above 1 each node "
        "has its own", metavar="DEVICE,…")
    turn_margin: int | None = _flag(parse_quantity_bytes, None,
        "so much memory of each device must be free beyond what the engine freed when it fell asleep, before it "
        "wakes; default: 512Mi", metavar="SIZE")
    turn_holder: str = _flag(_parse_name, None,
        "name under which others see that this worker has the turn; default: the host's name")
    log_level: str = _flag(str, "info", "minimum log level", ("debug", "info", "warning", "error"))
    log_format: str = _flag(str, "json", "log format", ("json", "text"))
    kube_api_url: str | None = _flag(str, None, "URL of the Kubernetes API; default: in-cluster", hidden=True)
    kube_ca: Path = _flag(Path, SERVICE_ACCOUNT / "ca.crt", "CA of the Kubernetes API", hidden=True)
    kube_token_file: Path = _flag(Path, SERVICE_ACCOUNT / "token", "token for the API", hidden=True)
    # fmt: on

    @property
    def token_audience(self) -> str:
        """The audience that tokens must be issued for; as in `rollout_operator.api.names.token_audience`."""
        return f"rollout.dev/{self.namespace}/{self.pool}"


FLAGS = tuple(
    CommandFlag(each.name.replace("_", "-"), **each.metadata) for each in fields(WorkerSettings)
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags; values stay text, so that `parse_settings` treats flags and variables alike."""
    for flag in FLAGS:
        default = f" (default: {flag.shown_default})" if flag.shown_default else ""
        parser.add_argument(
            f"--{flag.name}",
            choices=flag.choices,
            metavar=flag.metavar or (None if flag.choices else _METAVARS.get(flag.read)),
            action="append" if flag.repeated else "store",
            help=argparse.SUPPRESS
            if flag.hidden
            else f"{flag.help}{default} [{flag.variable_name}]",
        )


def parse_settings(given: argparse.Namespace, environ: Mapping[str, str]) -> WorkerSettings:
    """Return checked settings from flags and environment.

    Raises:
        InvalidSettings: Names the flag or variable and the fix.
    """
    values = {
        flag.field_name: _flag_value(flag, getattr(given, flag.field_name), environ)
        for flag in FLAGS
    }
    if values["model"] is None:
        raise InvalidSettings(
            "give --model PATH (or ROLLOUT_MODEL): the checkpoint's folder or Hub repository"
        )
    values["served_name"] = values["served_name"] or Path(values["model"]).name or "model"
    values["turn_holder"] = values["turn_holder"] or socket.gethostname()
    values["namespace"] = values["namespace"] or _own_namespace()
    values["weights_roots"] = _weights_roots(
        values["weights_roots"], in_pool=values["pool"] is not None
    )
    if values["pool"] is not None and values["keep_folder"] is None and POOL_KEEP_FOLDER.is_dir():
        values["keep_folder"] = POOL_KEEP_FOLDER
    found, values["engine_arg"] = _split_parser_flags(values["engine_arg"])
    for name, value in found.items():
        values[name] = values[name] or value
    settings = WorkerSettings(**values)
    check_settings(settings)
    return settings


def _flag_value(
    flag: CommandFlag, given: str | Sequence[str] | None, environ: Mapping[str, str]
) -> Any:
    if flag.repeated:
        if given is not None:
            return tuple(given)
        try:
            return tuple(shlex.split(environ.get(flag.variable_name, "")))
        except ValueError as error:
            raise InvalidSettings(
                f"{flag.variable_name} can't be split into shell words: {error}"
            ) from error
    # In manifests, people unset a variable by making it empty.
    text = environ.get(flag.variable_name) or None if given is None else given
    if text is None:
        return flag.default
    source = flag.variable_name if given is None else f"--{flag.name}"
    if flag.choices is not None and text not in flag.choices:
        raise InvalidSettings(f"{source} is {text!r}: choose one of {', '.join(flag.choices)}")
    try:
        return flag.read(cast(str, text))
    except ValueError as error:
        raise InvalidSettings(f"{source} is {text!r}: {error}") from error


def _split_parser_flags(words: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Take the names of parsers out of the engine's flags: in a pool, `spec.engine.args` is where they stand."""
    found: dict[str, str] = {}
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, _, name = word.partition("=")
        if flag not in PARSER_FLAGS:
            kept.append(word)
            continue
        found[PARSER_FLAGS[flag]] = name or next(rest, "")
        if not found[PARSER_FLAGS[flag]]:
            raise InvalidSettings(f"{flag} among the engine's flags names no parser: add its name")
    return found, tuple(kept)


def _own_namespace() -> str | None:
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text().strip() or None
    except OSError:
        return None


def _weights_roots(text: str | None, *, in_pool: bool) -> tuple[Path, ...]:
    if text is None:
        text = POOL_WEIGHTS_ROOTS if in_pool else ""
    roots = tuple(Path(part) for part in text.split(":") if part)
    for root in roots:
        if not root.is_absolute():
            raise InvalidSettings(f"--weights-roots contains {str(root)!r}: use absolute paths")
    return roots
