"""Our worker over SGLang, against SGLang's own server."""

from __future__ import annotations

from bench.baselines import sglang_server
from bench.options import Options
from bench.reporting.figures import Result
from bench.rigs.two_servers import compare, notes


def run(options: Options) -> Result:
    """Put both servers through the same loads."""
    figures = compare(sglang_server, options)
    title = "Our worker over SGLang against SGLang's own server"
    return Result("sglang", title, figures, notes(options))
