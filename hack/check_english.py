"""Check the English of docstrings, comments, messages and docs: `make lint` runs it.

A reader under stress needs plain sentences: a subject, a verb, an object, in the words of the field. The patterns
below are what made readers stumble; each has the words to use in its place. Quoted code is left out.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from check_names import ROOT, python_files

PACKAGES = ("operator", "worker", "client", "common", "hack", "bench", "examples")
PAGES = (
    *("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/concepts/*.md", "docs/operate/*.md"),
    *("charts/*/README.md", "examples/*/README.md"),
)

Pattern = tuple[re.Pattern[str], str]


def make_pattern(text: str, instead: str) -> Pattern:
    return re.compile(text), instead


PATTERNS: tuple[Pattern, ...] = (
    make_pattern(
        r"(?:^|[.;:] |\(|, )(?:Whoever|whoever|Who|who)(?! are| is)\b[^.?;]{0,80}?\b(?:is|has|gets|may|must|waits|stands|goes|asks)\b(?![^.]*\?)",
        "name the subject: 'a caller that', 'the process that'",
    ),
    make_pattern(r"\b(?i:whom?ever)\b", "'a caller that', 'any process that'"),
    make_pattern(
        r"\b(?:is|are|was|were) told (?:of|about|to|in|by|that)\b",
        "'is reported', 'learns', 'is described'",
    ),
    make_pattern(
        r"\b(?:tells?|told) (?:of|it|them|how|why|what|which|where|whether)\b",
        "'report', 'say', 'describe'",
    ),
    make_pattern(r"\bfor ever\b", "'forever', 'for good', or a limit"),
    make_pattern(r"\banew\b", "'again'"),
    make_pattern(r"\b[Mm]eanwhile\b", "'while …', 'until then'"),
    make_pattern(r"\b[Bb]eside\b(?! the point)", "'next to', 'in addition to', 'while … serves'"),
    make_pattern(
        r"\b(?:is|are|was|were) no (?!longer|more|less|later|earlier|one\b|match|room)[a-z]",
        "'is not a'",
    ),
    make_pattern(r"\bSee the (?:module|class)\b", "leave it out: `@override` needs no docstring"),
    make_pattern(r"^See `[\w.]+`\.?$", "leave it out: `@override` needs no docstring"),
    make_pattern(
        r"\b(?:the|a|its|in) (?:house|room|door|desk|board|witness)s?\b", "the field's own word"
    ),
    make_pattern(
        r"\b(?:looks|looked|look) (?:up )?at (?:each|every) second\b", "'polls every second'"
    ),
    make_pattern(r"\bgives? (?:it |them |that )?up its\b", "'release'"),
    make_pattern(
        r"\b[Ss]o (?:long|much longer) (?:who|than|as nobody)\b",
        "say what is limited: 'The longest time that …'",
    ),
)


def texts(source: str) -> Iterator[tuple[int, str]]:
    """The line and text of what people read of a module: docstrings, comments, strings with a few spaces in them."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if id(node) in docstrings or node.value.count(" ") > 2:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def find_problems(where: str, line: int, text: str) -> Iterator[str]:
    """Each pattern that a text has, with the line that it is on."""
    plain = re.sub(r"`[^`]*`", "`x`", text)
    for offset, part in enumerate(plain.split("\n")):
        for pattern, instead in PATTERNS:
            if (found := pattern.search(part.strip())) is not None:
                yield f"{where}:{line + offset}: {found.group()!r}: write {instead}"


def check_module(file: Path) -> Iterator[str]:
    for line, text in texts(file.read_text()):
        yield from find_problems(str(file.relative_to(ROOT)), line, text)


def check_page(file: Path) -> Iterator[str]:
    """Check one page of docs, but for its code blocks."""
    text = re.sub(
        r"^```.*?^```", lambda m: "\n" * m.group().count("\n"), file.read_text(), flags=re.M | re.S
    )
    yield from find_problems(str(file.relative_to(ROOT)), 1, text)


def main(chosen: list[str]) -> int:
    """Print what is wrong below the chosen paths (default: everywhere); the exit status says whether anything is."""
    modules = [file for file in python_files(*PACKAGES) if file != Path(__file__).resolve()]
    pages = [file for pattern in PAGES for file in sorted(ROOT.glob(pattern))]
    problems = [
        problem
        for file in (*modules, *pages)
        if not chosen or str(file.relative_to(ROOT)).startswith(tuple(chosen))
        for problem in (check_module if file.suffix == ".py" else check_page)(file)
    ]
    print("\n".join(problems), file=sys.stderr)
    print(f"English: {len(problems)} problems")
    return min(len(problems), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
