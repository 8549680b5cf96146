"""Generation by our worker over vLLM and SGLang, against the engine's own server.

Both servers run at once with the same flags and take turns under the same loads. `ROLLOUT_ENGINES=vllm` restricts the
engines; each has a table of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.options import Options
from bench.reporting.figures import Result
from bench.rigs.two_servers import compare, contenders_here, describe_conditions


def run(options: Options) -> Iterator[Result]:
    for servers, name in contenders_here():
        title = f"Our worker over {name} against {name}'s own server"
        figures, notes = compare(servers, options), describe_conditions()
        yield Result("generate", title, figures, notes, part=servers.ENGINE)
