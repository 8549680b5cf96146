"""When SGLang's scheduler counts as idle while grammars are compiled, in SGLang's environment; no engine is started."""

from __future__ import annotations

from tests.support.engine.engine_programs import EnginePrograms

ASKED = """
import json
from collections import deque
from types import SimpleNamespace as Some

from sglang.srt.managers.scheduler import DisaggregationMode, Scheduler

from rollout_worker.engines.sglang.child_process.sglang_grammars import install_grammars

install_grammars()
scheduler = object.__new__(Scheduler)
vars(scheduler).update(
    running_batch=Some(is_empty=lambda: True), last_batch=None, chunked_req=None, result_queue=deque(),
    dllm_manager=Some(any_staging_reqs=lambda: False), _pp_microbatches_drained=lambda: True, enable_overlap=True,
    disaggregation_mode=DisaggregationMode.NULL, enable_hisparse=False, enable_hierarchical_cache=False,
    enable_lmcache=False, enable_flexkv=False, waiting_queue=[], grammar_manager=Some(grammar_queue=["a request"]),
)
idle = {"running": scheduler.is_fully_idle(), "paused": scheduler.is_fully_idle(ignore_waiting=True)}
scheduler.waiting_queue = [Some(kv=Some(holds_kv=True))]
idle["with KV"] = scheduler.is_fully_idle(ignore_waiting=True)
print(json.dumps({**idle, "compiling": len(scheduler.grammar_manager.grammar_queue)}))
"""


def test_a_paused_scheduler_is_idle_while_a_grammar_is_compiled(
    sglang_programs: EnginePrograms,
) -> None:
    """Else a commit's flush fails, which ends the child, and a sleep ends the scheduler by an assertion."""
    found = sglang_programs.read_answer(ASKED)
    assert found == {"running": False, "paused": True, "with KV": False, "compiling": 1}
