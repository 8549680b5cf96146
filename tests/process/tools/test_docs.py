"""The documents say what the code does: flags, routes, reasons, problems, metrics, examples."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest
import yaml
from pydantic import BaseModel
from safetensors.numpy import save_file

from rollout_client.commands.rollout_command import make_parser
from rollout_client.conversation.conversation_data import CounterName
from rollout_common.wire.problems import KINDS
from rollout_operator import config
from rollout_operator.api.names import ConditionType
from rollout_operator.api.objects import PoolKey
from rollout_operator.api.spec import parse_spec
from rollout_operator.api.status import PoolPhase
from rollout_operator.core import status_report
from rollout_operator.operator_telemetry import OperatorTelemetry as OperatorTelemetry
from rollout_operator.pool_page import PoolMetrics
from rollout_worker import schemas
from rollout_worker.core.lifecycle_states import MOVES
from rollout_worker.engine import Sink, TensorEntry, TensorSpec
from rollout_worker.engines import model_folder
from rollout_worker.lifecycle import settings as lifecycle_settings
from rollout_worker.observe.worker_telemetry import WorkerTelemetry as WorkerTelemetry
from rollout_worker.ports.callers.auth import AllowAnyone
from rollout_worker.ports.control_routes import make_control_app
from rollout_worker.ports.data_routes import make_data_app
from rollout_worker.requests import settings as requests_settings
from rollout_worker.service import WorkerService
from rollout_worker.settings import FLAGS, add_flags, parse_settings
from rollout_worker.sources import checkpoint_files as checkpoints
from rollout_worker.sources.tensor_filling import SinkFilling
from rollout_worker.updates import settings as updates_settings
from tests.support.unit import shipped
from tests.support.unit.chatstyles import tokenizer
from tests.support.unit.emitted import reasons

ROOT = Path(__file__).parents[3]
INTERNAL = {
    "`adapter.EngineParts`",
    "`admission_queue.QueuedRequest`",
    "`grammar_checker.GrammarChecker`",
    "`grammar_checker.tokenizer_text`",
    "`request_checks.ServedModel`",
    "`request_checks.TextTail`",
    "`sinks.open_unnamed_file`",
    "`staging_budget.StagingLimitReached`",
    "`tensor_views.AbsentTensor`",
    "`tensor_views.AbsentTensorRead`",
    "`weight_versions.SealableSink`",
}
"""What engines share but new ones need not know."""
DOCS = ROOT / "docs"
PAGES = sorted(
    [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").glob("*.md")],
    key=lambda path: str(path),
)
BODIES: dict[str, type[BaseModel]] = {
    "/v1/generate": schemas.GenerateRequest,
    "/v1/weights/stage": schemas.StageRequest,
    "/v1/weights/commit": schemas.CommitRequest,
    "/v1/sleep": schemas.SleepRequest,
    "/v1/wake": schemas.WakeRequest,
    "/v1/pause": schemas.PauseRequest,
}
CODE = re.compile(r"`([^`]+)`")


def page(name: str) -> str:
    return (ROOT / name).read_text()


def section(text: str, title: str) -> str:
    """The part of a page below a heading, up to the next one of its level or above."""
    match = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert match, f"no section {title!r}"
    rest = text[match.end() :]
    after = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.MULTILINE)
    return rest[: after.start()] if after else rest


def cells(text: str, column: int) -> Iterator[str]:
    """The texts of one column of all tables."""
    for line in text.splitlines():
        parts = re.split(r"(?<!\\)\|", line)[1:-1]
        if line.startswith("|") and not set(line) <= set("|-: ") and len(parts) > column:
            yield parts[column].strip()


def named(text: str, column: int) -> set[str]:
    """What stands in backticks in one column of all tables."""
    return {name for cell in cells(text, column) for name in CODE.findall(cell)}


# The worker.


def test_worker_flags_are_described() -> None:
    rows = zip(cells(FLAG_TABLE, 0), cells(FLAG_TABLE, 1), cells(FLAG_TABLE, 2), strict=True)
    shown = {
        (f"`--{f.name}`", f"`{f.variable_name}`", f"`{f.shown_default}`" if f.shown_default else "")
        for f in FLAGS
        if not f.hidden
    }
    assert {row for row in rows if row[0] != "flag"} == shown


FLAG_TABLE = section(page("docs/worker.md"), "Flags").split("The hf engine's own flags")[0]


def test_flags_of_the_hf_engine_are_described() -> None:
    settings = page("worker/engines/hf/settings.py")
    flags = set(re.findall(r'"(--[a-z-]+)"', settings))
    table = section(page("docs/worker.md"), "Flags").split("The hf engine's own flags")[1]
    assert named(table, 0) == flags


def test_routes_are_described() -> None:
    worker = WorkerService(_settings())
    tables = section(page("docs/worker.md"), "Routes").split("Control port (8001)")
    apps = (make_data_app(worker), make_control_app(worker, AllowAnyone()))
    for app, table in zip(apps, tables, strict=True):
        assert named(table, 0) == {
            f"{method.upper()} {path}"
            for path, methods in app.openapi()["paths"].items()
            for method in methods
        }


def _settings() -> Any:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    words = ["--model", "model", "--auth", "none", "--control-host", "127.0.0.1"]
    return parse_settings(parser.parse_args(words), {})


def test_lifecycle_table_is_the_codes() -> None:
    table = section(page("docs/architecture-worker.md"), "Lifecycle")
    rows = zip(cells(table, 0), cells(table, 1), strict=True)
    shown = {CODE.findall(a)[0]: set(CODE.findall(b)) for a, b in rows if CODE.search(a)}
    assert shown == {old.value: {new.value for new in news} for old, news in MOVES.items()}


def test_problems_are_described() -> None:
    table = section(page("docs/operate/errors.md"), "Problems a worker answers")
    rows = zip(cells(table, 0), cells(table, 1), strict=True)
    shown = {CODE.findall(a)[0]: int(b) for a, b in rows if CODE.search(a)}
    assert shown == {slug: status for slug, (status, _) in KINDS.items()}


# The operator.


def test_reasons_are_described() -> None:
    status = page("docs/operate/status.md")
    conditions = named(section(status, "Reasons"), 1)
    events = named(section(status, "Events"), 1)
    assert conditions | events == reasons(ROOT / "operator")


def test_conditions_are_described() -> None:
    table = section(page("docs/operate/status.md"), "Reasons")
    shown = {cell.partition("=")[0] for cell in cells(table, 0)} - {"", "condition"}
    assert shown == set(ConditionType)


def test_operator_flags_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config.parse_config(["run", "--help"], {})
    flags = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert (
        named(section(page("docs/operate/install.md"), "Install, upgrade, uninstall"), 0) == flags
    )


def test_verbs_and_options_of_the_command_are_described() -> None:
    parser = make_parser("rollout")
    verbs = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    options = {
        option: {name for name, verb in verbs.items() if option in verb._option_string_actions}
        for verb in verbs.values()
        for option in verb._option_string_actions
        if option not in ("-h", "--help")
    }
    cli = page("docs/cli.md")
    assert named(section(cli, "Verbs"), 0) == set(verbs)
    every = set(verbs) - {"up"}
    shown: dict[str, set[str]] = {}
    table = section(cli, "Options")
    for names, of in zip(cells(table, 0), cells(table, 1), strict=True):
        for name in CODE.findall(names):
            shown[name] = every if of.startswith("all but") else set(CODE.findall(of))
    assert shown == {k: v - {"up"} for k, v in options.items() if v != {"up"}}


def test_phases_are_described_in_the_order_in_which_they_win() -> None:
    table = section(page("docs/operate/status.md"), "Phases")
    shown = [CODE.findall(cell)[0] for cell in cells(table, 0) if CODE.search(cell)]
    ladder = inspect.getsource(status_report._pool_phase)
    assert shown == [PoolPhase[name].value for name in re.findall(r"Phase\.([A-Z]+)[,)]", ladder)]
    assert set(shown) == set(PoolPhase)


def test_alerts_are_described() -> None:
    rules = yaml.safe_load(page("charts/rollout-operator/rules.yaml"))
    alerts = {rule["alert"]: rule for group in rules["groups"] for rule in group["rules"]}
    assert named(section(page("docs/runbook.md"), "Alerts"), 0) == set(alerts)
    known = anchors(page("docs/runbook.md"))
    for name, rule in alerts.items():
        document, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert document == "docs/runbook.md", name
        assert anchor in known, f"{name}: #{anchor}"


# Metrics.


def test_operator_metrics_are_described() -> None:
    telemetry = OperatorTelemetry()
    figures = PoolMetrics(weights={"target": (1, 1)}, conditions={"Ready": "True"})
    telemetry.pools.set_figures(PoolKey("a", "b"), figures)
    table = section(page("docs/operate/metrics.md"), "Operator")
    ours = {
        name for name in families(telemetry.render_page().decode()) if name.startswith("rollout_")
    }
    assert named(table, 0) == ours


def test_worker_metrics_are_described() -> None:
    engine = set(re.findall(r'"(hf_engine_\w+)"', page("worker/engines/hf/parts.py")))
    ours = families(WorkerTelemetry().render_page("").decode()) | engine
    assert named(section(page("docs/operate/metrics.md"), "Worker"), 0) == ours


def families(text: str) -> set[str]:
    """Names in a page of metrics, as they are scraped; histograms without their suffixes."""
    return set(re.findall(r"^# TYPE (\w+) (?:gauge|counter|histogram)$", text, re.MULTILINE))


# Examples, links, commands.


def anchors(text: str) -> set[str]:
    """What a link to a section of this page may name."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_links_lead_somewhere() -> None:
    known = {path: anchors(path.read_text()) for path in PAGES}
    for path in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", path.read_text()):
            if "://" in target:
                continue
            to = (path.parent / target).resolve() if target else path
            assert to.exists(), f"{path.name} links to {target}"
            if anchor:
                found = known.get(to) or anchors(to.read_text())
                assert anchor in found, f"{path.name} links to #{anchor} of {to.name}"


def test_every_page_is_on_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    pages = (
        path for path in PAGES if path.is_relative_to(DOCS) and path.parent.name != "decisions"
    )
    assert [str(path) for path in pages if f"{path.relative_to(ROOT)}\n" not in site] == []


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_manifests_in_documents_are_valid() -> None:
    seen = 0
    texts = [block for path in PAGES for block in blocks(path.read_text(), "yaml")]
    texts += [path.read_text() for path in (ROOT / "examples").glob("*.yaml")]
    for text in texts:
        for document in yaml.safe_load_all(text):
            if document.get("kind") == "RolloutReplica":
                parse_spec(document)
                seen += 1
    assert seen >= 2


def test_patches_in_documents_are_valid() -> None:
    base = yaml.safe_load(page("examples/hf.yaml"))
    patches = [p for path in PAGES for p in re.findall(r"'(\{\"spec\".*?\})'", path.read_text())]
    for text in patches:
        spec = json.loads(text)["spec"]
        weights = {**base["spec"]["weights"], **spec.pop("weights", {})}
        parse_spec({"spec": {**base["spec"], "weights": weights, **spec}})
    assert len(patches) >= 4


def test_bodies_of_curl_are_valid() -> None:
    found = [
        match
        for path in PAGES
        for match in re.findall(
            r"localhost:\d+(/v1/[\w/]+)\S*[\\\s]+--json[\\\s]+'([^']+)'", path.read_text()
        )
    ]
    for route, body in found:
        BODIES[route].model_validate_json(body)
    assert {route for route, _ in found} >= {"/v1/generate", "/v1/weights/stage", "/v1/sleep"}


def test_code_about_conversations_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer("qwen").save_pretrained(tmp_path)
    found = blocks(page("docs/multi-turn.md"), "python")
    names: dict[str, Any] = {"MODEL": str(tmp_path)}
    for block in found:
        exec(compile(block, "docs/multi-turn.md", "exec"), names)
    assert len(found) >= 9
    assert "tokens, 32 are allowed" in capsys.readouterr().out
    assert names["request"].difference is None


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "glm4moe"])
def test_the_conversation_runs_with_templates_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shipped.tokenizer(name).save_pretrained(tmp_path)
    names: dict[str, Any] = {"MODEL": str(tmp_path)}
    for block in blocks(section(page("docs/multi-turn.md"), "A conversation"), "python"):
        exec(compile(block, "docs/multi-turn.md", "exec"), names)
    assert names["request"].state == "completed"


# Engines.


async def test_the_code_about_sinks_can_be_filled(tmp_path: Path) -> None:
    have = np.arange(6, dtype=np.float32).reshape(2, 3)
    save_file({"w": have}, tmp_path / "model.safetensors")
    (block,) = blocks(page("docs/engines.md"), "python")
    names: dict[str, Any] = {}
    exec(compile(block, "docs/engines.md", "exec"), names)
    sink = names["Buffers"]()

    class Giver:
        async def open_slot(self, entries: Sequence[TensorEntry], *, on_disk: bool = False) -> Sink:
            assert [entry.spec for entry in entries] == [TensorSpec("F32", (2, 3))]
            return cast("Sink", sink)

    layout = model_folder.checkpoint_layout(checkpoints.open_source(tmp_path).entries)
    await SinkFilling(Giver().open_slot, layout, lambda _: None).fill_from_files((tmp_path, ()))
    assert bytes(sink.tensors["w"]) == have.tobytes()
    assert (sink.sealed, sink.nbytes) == (True, 24)
    sink.close()
    sink.close()
    assert (sink.sealed, sink.nbytes) == (False, 0)


SHARED_MODULES = (
    *("adapter", "admission_queue", "file_adapters", "grammars.grammar_checker"),
    *("grammars.grammar_state", "model_folder", "picture_model", "picture_positions"),
    *("shared_memory.rank_mappings", "shared_memory.ranks", "recent_values", "request_checks"),
    *("selfcheck", "shared_memory.sinks", "shared_memory.staging_budget"),
    *("shared_memory.tensor_views", "tested", "weight_versions"),
)


def test_what_engines_share_is_described_as_it_is() -> None:
    known = {
        name.rpartition(".")[2]: importlib.import_module(f"rollout_worker.engines.{name}")
        for name in SHARED_MODULES
    }
    seen = set()
    table = section(page("docs/engines.md"), "Parts that every engine shares")
    for name, text in zip(cells(table, 0), cells(table, 1), strict=True):
        module, _, path = name.strip("`").partition(".")
        if not path:
            continue
        arguments = re.sub(r"\[(?:[^][]|\[[^]]*\])*\]", "", CODE.findall(text)[0].split(" -> ")[0])[
            1:-1
        ]
        said = re.findall(r"(?:^|, )(\w+)", arguments)
        have = inspect.signature(attrgetter(path)(known[module])).parameters
        assert said == [each for each in have if each != "self"], name
        seen.add(name)
    public = {
        f"`{short}.{name}`"
        for short, module in known.items()
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }
    assert seen == public - INTERNAL


def test_the_time_of_each_call_to_an_engine_is_told() -> None:
    life = section(page("docs/engines.md"), "Life")
    [told] = re.findall(r"^A call that takes too long .*\n.*\n.*$", life, re.MULTILINE)
    seconds = {
        verb: float(after)
        for verbs, after in re.findall(r"((?:`\w+`(?:, | and )?)+) (?:after )?(\d+) s", told)
        for verb in CODE.findall(verbs)
    }
    pause = {lifecycle_settings.ENGINE_PAUSE_SECONDS, updates_settings.ENGINE_PAUSE_SECONDS}
    memory = {lifecycle_settings.MEMORY_CALL_SECONDS, updates_settings.ENGINE_COMMIT_SECONDS}
    assert {seconds[verb] for verb in ("hold_admission", "pause", "resume")} == pause
    assert {seconds[verb] for verb in ("commit", "sleep", "wake")} == memory
    assert seconds["abort"] == requests_settings.ABORT_TIMEOUT_SECONDS
    assert f"waits {lifecycle_settings.ENGINE_STOP_SECONDS:g} s" in told


def test_every_file_of_the_contract_suite_is_described() -> None:
    suite = section(page("docs/engine-limits.md"), "The contract suite")
    assert named(suite, 0) == {each.name for each in (ROOT / "tests/contract").glob("test_*.py")}


def test_fields_of_conversations_are_described() -> None:
    text = page("docs/multi-turn.md")
    assert named(section(text, "Templates"), 0) == set(get_args(CounterName))
    made = named(section(text, "Batches"), 0)
    assert made == set(names_of_batch())


def names_of_batch() -> set[str]:
    request = schemas.RolloutRequest.from_messages(
        [{"role": "user", "content": "hi"}], tokenizer("qwen"), max_prompt_len=64
    )
    return set(schemas.to_batch([request], pad_token_id=0).batch)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", page("Makefile"), re.MULTILINE))
    pattern = r"(?:^(?:CLUSTER=existing )?|`)make ([a-z-]+)(?=$| *[`#A-Z]|  )"
    for path in PAGES:
        assert set(re.findall(pattern, path.read_text(), re.MULTILINE)) <= targets, path


def test_every_decision_is_listed_and_has_one_form() -> None:
    listed = set(re.findall(r"\(decisions/([^)]+)\)", page("docs/README.md")))
    decisions = list((DOCS / "decisions").glob("*.md"))
    assert listed == {path.name for path in decisions}
    for path in decisions:
        text = path.read_text()
        assert re.match(rf"# {path.name[:3]}\. \S", text), path
        parts = re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE)
        assert parts == ["Context", "Decision", "Consequences"], path
        assert len(text.splitlines()) <= 60, f"{path}: a decision fits one page"


def test_fields_are_shown_as_a_person_writes_them() -> None:
    text = page("docs/api.md")
    assert "| `spec.sleep.spill.sizeLimit` | quantity |" in text
    assert not re.search(r"%[ds]", text), "a message of the API server has values there"
