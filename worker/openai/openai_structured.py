"""What OpenAI's `response_format` and a forced `tool_choice` ask of the text, as a structured output."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_common.wire.problems import ProblemError
from rollout_common.wire.rich_requests import encode_schema

from .answer_formats import CallFormat
from .openai_errors import unsupported_field
from .openai_models import ChatRequest

ANY_OBJECT = {"type": "object"}
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of JSON Schema whose values are schemas by names of the user's choice."""
PLAIN_VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are data, whatever they look like."""


def response_structure(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the structure that a `response_format` asks for, None for text.

    Raises:
        ProblemError: 422; it names the field.
    """
    given = response_format or {}
    match given.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return {"json_schema": ANY_OBJECT}
        case "json_schema":
            described = given.get("json_schema")
            schema = described.get("schema") if isinstance(described, Mapping) else None
            if not isinstance(schema, Mapping):
                raise unsupported_field(
                    "response_format", "give the schema as an object in json_schema.schema"
                )
            return {"json_schema": schema}
    raise unsupported_field("response_format", "use type text, json_object or json_schema")


def forced_functions(body: ChatRequest) -> list[Mapping[str, Any]]:
    """Return the functions of which the answer must call one, empty if it may be text.

    Raises:
        ProblemError: 422; it names the field.
    """
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return []
    functions = [tool.function for tool in body.tools or ()]
    named = choice.get("function") if isinstance(choice, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else None
    if name is not None:
        functions = [each for each in functions if each.get("name") == name]
        if not functions:
            raise unsupported_field("tool_choice", f"no tool is called {name!r}: name one of tools")
    elif choice != "required":
        raise unsupported_field(
            "tool_choice", "use 'auto', 'none', 'required', or a function by name"
        )
    if not functions:
        raise unsupported_field("tool_choice", "there is nothing to call: add tools")
    if response_structure(body.response_format) is not None:
        raise unsupported_field(
            "response_format", "a forced tool_choice sets the format: leave it out"
        )
    return functions


def tool_call_structure(
    form: CallFormat,
    functions: Sequence[Mapping[str, Any]],
    specials: Sequence[str],
    *,
    several: bool,
) -> dict[str, Any]:
    """Return the structure of calls of these functions in a format that can be forced, of `several` or of one.

    Each has a `name`, perhaps `parameters`, a JSON Schema. A grammar names special tokens apart from text.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": each.get("name")},
                "arguments": _move_references(
                    each.get("parameters") or ANY_OBJECT, f"#/anyOf/{index}/properties/arguments"
                ),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, each in enumerate(functions)
    ]
    marks = (form.opens[0], form.closes) if form.closes else ()
    named = [mark if mark in specials else json.dumps(mark) for mark in marks]
    call = f'{named[0]} "\\n" body "\\n" {named[1]}' if named else "body"
    try:
        schema = encode_schema({"anyOf": calls})
    except ValueError as error:
        raise unsupported_field("tools", f"as one schema it {error}") from error
    more = f' ("{form.between}\\n" call)*' if several else ""
    rules = (f"start: call{more}", f"call: {call}", f"body: %json {schema}")
    return {"grammar": "\n".join(rules)}


def _move_references(schema: Any, place: str) -> Any:
    """Return a schema as it has to be at `place` in another one: its references begin at the root of the document.

    Those of a part with an `$id` begin at that part.
    """
    if isinstance(schema, list):
        return [_move_references(each, place) for each in schema]
    if not isinstance(schema, Mapping) or "$id" in schema:
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = place + value[1:]
        elif key in SCHEMAS_BY_NAME and isinstance(value, Mapping):
            moved[key] = {name: _move_references(each, place) for name, each in value.items()}
        else:
            moved[key] = value if key in PLAIN_VALUES else _move_references(value, place)
    return moved


def rename_structured_error(error: ProblemError, field: str) -> ProblemError:
    """Return the refusal of a structure under the name of the field that asked for it."""
    known = (error.problem.model_extra or {}).get("errors", ())
    if not any(each["field"].startswith("structured") for each in known):
        return error
    return unsupported_field(field, "; ".join(each["message"] for each in known))
