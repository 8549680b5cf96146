"""The task of tools.py: sums of two numbers, and a calculator, called by `<calc>17+25</calc>`.

An answer is either just such a call, or the final one: the sum in digits.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

END = "<|im_end|>"
ALPHABET = "0123456789+<>/calc"
"""Characters that the policy may write, besides `END`."""

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.get('tool_calls', []) %}"
    "<calc>{{ call.function.arguments.expression }}</calc>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, with calls as this policy writes them."""

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
_CALL = re.compile(r"<calc>([^<>]*)</calc>")
_SUM = re.compile(r"([0-9]+)\+([0-9]+)")


@dataclass(frozen=True)
class Question:
    """What is a + b?"""

    a: int
    b: int

    @classmethod
    def drawn(cls, dice: random.Random) -> Question:
        """Return a random question with two-digit numbers."""
        return cls(dice.randint(10, 99), dice.randint(10, 99))

    @property
    def text(self) -> str:
        """The user's message."""
        return f"{self.a}+{self.b}"

    def reward(self, answer: str) -> float:
        """Return 1 for the sum in digits, else 0."""
        return float(answer == str(self.a + self.b))


def expression_of(answer: str) -> str | None:
    """Return the expression for the calculator; None if this answer is the final one."""
    match = _CALL.fullmatch(answer)
    return match[1] if match else None


def call(expression: str, name: str) -> dict[str, Any]:
    """Return a call in OpenAI's format; `name` is its id."""
    function = {"name": "calculator", "arguments": {"expression": expression}}
    return {"id": name, "type": "function", "function": function}


def calculate(expression: str) -> str:
    """Return the sum; `error` if the expression is not one."""
    match = _SUM.fullmatch(expression)
    return str(int(match[1]) + int(match[2])) if match else "error"


def opening(question: Question) -> str:
    """Return the text of a prompt."""
    return f"<|im_start|>user\n{question.text}{END}\n<|im_start|>assistant\n"


def between(answer: str, ended: bool) -> str:
    """Return the text between a call and the policy's next turn.

    Args:
        answer: the answer with the call.
        ended: whether the policy itself wrote `END`.
    """
    close = "" if ended else END
    result = calculate(expression_of(answer) or "")
    return f"{close}\n<|im_start|>tool\n{result}{END}\n<|im_start|>assistant\n"


def shown(question: Question, dice: random.Random) -> list[str]:
    """Return the answers of a teacher that guesses every other time, and otherwise asks first."""
    if dice.random() < 0.5:
        return [str(dice.randint(20, 198))]
    return [f"<calc>{question.text}</calc>", str(question.a + question.b)]
