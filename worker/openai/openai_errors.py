"""Refusals in OpenAI's format: of its routes, and of paths that its clients mean by them, such as without `/v1`.

OpenAI's own client shows nothing of an error in any other format.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi.responses import JSONResponse, Response

from rollout_common.wire import WeightsId, WeightsSpan
from rollout_common.wire.problems import ProblemError

from .openai_models import openai_error_words

OPENAI_PATH = re.compile(r".*/(?:completions|responses|embeddings|models(?:/.*)?)/?")


def error_body(error: ProblemError, *, chat: bool) -> dict[str, Any]:
    """A problem in OpenAI's format, under the names of the route's own fields."""
    problem = error.problem
    detail, field = openai_error_words(problem, "messages" if chat else "prompt")
    return {
        "error": {
            "message": detail,
            "type": "invalid_request_error" if problem.status < 500 else "server_error",
            "param": field,
            "code": error.slug,
        }
    }


def error_response(error: ProblemError, path: str) -> Response:
    """The response for an error; if it depends on the active weights, its headers name them."""
    active = (error.problem.model_extra or {}).get("active")
    headers = {} if active is None else identity_headers(WeightsId(**active))
    return JSONResponse(
        error_body(error, chat="/chat/" in path), error.problem.status, headers=headers
    )


def identity_headers(weights: WeightsId | WeightsSpan) -> dict[str, str]:
    """The headers that name weights."""
    return {"X-Weights-Epoch": str(weights.epoch), "X-Weights-Version": str(weights.version)}
