"""What a kind of request adds to a plain one: our worker over each engine, against the engine's own server.

Both servers run at once with the same flags and take turns, as `generate` has them. The kinds that both understand are
compared: the most likely tokens at each position, a scored prompt, a JSON schema, an adapter, a picture (vLLM), and routed
experts (SGLang). The masks of draws, and SGLang's pictures, are compared with our plain requests.
`ROLLOUT_ENGINES=vllm` restricts the engines; each has a table of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.options import Options
from bench.reporting.figures import Result
from bench.rigs.request_comparison import GOAL_RATIO, compare_kinds
from bench.rigs.two_servers import contenders_here

NOTES = (
    f"Goal: at most {GOAL_RATIO:g} times what the same kind takes at the engine's own server."
    " Tiny model in float32, 8 at once, prompts and answers of 64 tokens.",
    "Plain: ids with the logprobs of the sampled tokens. The difference to it is what a kind adds.",
    "Adapter: LoRA of rank 8 on all linear layers. Picture: 200 x 200, sent with each request, eight of them in turn;"
    " a model of Qwen2-VL's shape. Routed experts: a model of Qwen3-MoE's shape, 2 layers of 16 experts.",
)


def run(options: Options) -> Iterator[Result]:
    for servers, name in contenders_here():
        title = f"What kinds of requests add, our worker over {name} and {name}'s own server"
        figures = compare_kinds(servers, options)
        yield Result("requests", title, figures, NOTES, part=servers.ENGINE)
