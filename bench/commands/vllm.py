"""Our worker over vLLM, against vLLM's own server."""

from __future__ import annotations

from bench.baselines import vllm_server
from bench.options import Options
from bench.reporting.figures import Result
from bench.rigs.two_servers import compare, notes


def run(options: Options) -> Result:
    """Put both servers through the same loads."""
    figures = compare(vllm_server, options)
    title = "Our worker over vLLM against vLLM's own server"
    return Result("vllm", title, figures, notes(options))
