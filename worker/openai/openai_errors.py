"""Refusals in OpenAI's format: of its routes, and of paths that its clients mean by them, such as without `/v1`.

OpenAI's own client shows nothing of an error in any other format.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi.responses import JSONResponse, Response

from rollout_common.wire import WeightsId, WeightsSpan
from rollout_common.wire.problems import ProblemError

OPENAI_PATH = re.compile(r".*/(?:completions|responses|embeddings|models(?:/.*)?)/?")


def error_body(error: ProblemError, *, chat: bool) -> dict[str, Any]:
    """A problem in OpenAI's format, under the names of the route's own fields."""
    problem, fields = error.problem, []
    detail = problem.detail
    for said in (problem.model_extra or {}).get("errors", ()):
        field = said["field"].removeprefix("sampling.")
        if field.partition(".")[0] == "token_ids":
            field = "messages" if chat else "prompt"
        detail = detail.replace(f"{said['field']}: ", f"{field}: ")
        fields.append(field)
    return {
        "error": {
            "message": detail,
            "type": "invalid_request_error" if problem.status < 500 else "server_error",
            "param": next(filter(None, fields), None),
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


def unsupported_field(field: str, fix: str) -> ProblemError:
    """The refusal of a field that would otherwise be ignored."""
    detail = f"{field} is not supported here: {fix}"
    return ProblemError("unsupported", detail, errors=[{"field": field, "message": detail}])
