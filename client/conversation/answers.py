"""The content of an answer whose calls are given beside its text.

What a policy writes holds its calls; a template prints the content of a message, and then the
calls. With the whole text as content the calls would be printed twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from .messages import Message
from .processing import TemplateError
from .templates import Template
from .windows import MARK, PLAIN


def content_of(template: Template, text: str, calls: Sequence[Message]) -> str:
    """Return the part of an answer's text that is not its calls.

    It is the one with which the template prints the text again. Where none does (the policy wrote
    a call otherwise than the template would), it is what stands before the first call.
    """
    _, marked, printed = _printed(template, MARK, calls).rpartition(MARK)
    begin = template.seams.first_special(printed.lstrip()) or printed.strip().partition("\n")[0]
    content = text[: text.find(begin)] if begin and begin in text else text
    gap = printed[: len(printed) - len(printed.lstrip())]
    found = [content.removesuffix(gap), content, ""] if marked else [""]
    for each in dict.fromkeys((*found, text)):
        before, same, rest = _printed(template, each, calls).rpartition(text)
        once = same and text not in before
        if once and not template.seams.without_specials(rest).strip():
            return each
    return found[0] if marked else text


def _printed(template: Template, content: str, calls: Sequence[Message]) -> str:
    answer = {"role": "assistant", "content": content, "tool_calls": list(calls)}
    try:
        return template.render([PLAIN[0], answer])
    except TemplateError:
        return ""
