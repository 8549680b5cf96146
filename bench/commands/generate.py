"""Generation by our worker over each engine, against the engine's own server or transformers alone.

vLLM and SGLang: our worker and the engine's own server run at once with the same flags and take turns under the
same loads. hf: our engine in this process, against static batches and transformers' continuous batching.
`ROLLOUT_ENGINES=hf,vllm` restricts the engines; each has a table of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.options import Options
from bench.reporting.figures import Result
from bench.rigs import transformers_ways
from bench.rigs.two_servers import compare, contenders_here, describe_conditions
from tests.support.engine.engine_kinds import KINDS, left_out


def run(options: Options) -> Iterator[Result]:
    if left_out(KINDS["hf"]) is None:
        yield transformers_ways.measure(options)
    for servers, name in contenders_here():
        title = f"Our worker over {name} against {name}'s own server"
        figures, notes = compare(servers, options), describe_conditions()
        yield Result("generate", title, figures, notes, part=servers.ENGINE)
