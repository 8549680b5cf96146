"""The small changes that a module can suffer. Pure: source in, edits out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

SWAPS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Edit:
    """Bytes `start:end` of a module become `text`; `line` is where, counted from 1."""

    start: int
    end: int
    text: str
    line: int

    def apply(self, source: str) -> str:
        """Return the module with this change."""
        raw = source.encode()
        return (raw[: self.start] + self.text.encode() + raw[self.end :]).decode()


def edits_of(source: str) -> list[Edit]:
    """Return every change of this module, each once, in order."""
    found = set(_Finder(source).walk(ast.parse(source)))
    return sorted(found, key=lambda e: (e.start, e.end, e.text))


def compiles(source: str) -> bool:
    """Whether this is still Python."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


class _Finder:
    """Walks a tree and yields the edits of each node."""

    def __init__(self, source: str) -> None:
        self._raw = source.encode()
        self._starts = [0]
        for line in self._raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def walk(self, node: ast.AST) -> Iterator[Edit]:
        """Yield the edits of a node and of all below it that a test could notice."""
        if _is_silent(node):
            return
        find = getattr(self, f"_{type(node).__name__.lower()}", None)
        if find is not None:
            yield from find(node)
        for child in _children(node):
            yield from self.walk(child)

    def _at(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        start, end = self._at(node)
        return self._raw[start:end].decode()

    def _put(self, node: ast.expr | ast.stmt, text: str) -> Edit:
        return Edit(*self._at(node), text, node.lineno)

    def _between(
        self, left: ast.expr | ast.stmt, right: ast.expr, old: str, new: str
    ) -> Iterator[Edit]:
        """Swap the operator between two operands."""
        begin, end = self._at(left)[1], self._at(right)[0]
        offset = self._raw[begin:end].find(old.encode())
        if offset >= 0:
            start = begin + offset
            yield Edit(start, start + len(old.encode()), new, left.lineno)

    def _compare(self, node: ast.Compare) -> Iterator[Edit]:
        operands = (node.left, *node.comparators)
        for op, left, right in zip(node.ops, operands, node.comparators, strict=False):
            begin, end = self._at(left)[1], self._at(right)[0]
            for new in SWAPS[type(op)]:
                yield Edit(begin, end, f" {new} ", left.lineno)

    def _boolop(self, node: ast.BoolOp) -> Iterator[Edit]:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from self._between(left, right, old, new)
        for gone in node.values:
            kept = [self._text(v) for v in node.values if v is not gone]
            yield self._put(node, f"({f' {old} '.join(kept)})")

    def _unaryop(self, node: ast.UnaryOp) -> Iterator[Edit]:
        if isinstance(node.op, ast.Not | ast.USub):
            yield self._put(node, f"({self._text(node.operand)})")

    def _binop(self, node: ast.BinOp) -> Iterator[Edit]:
        if type(node.op) in ARITHMETIC:
            yield from self._between(node.left, node.right, *ARITHMETIC[type(node.op)])
            yield self._put(node, f"({self._text(node.left)})")
            yield self._put(node, f"({self._text(node.right)})")

    def _if(self, node: ast.If | ast.While) -> Iterator[Edit]:
        yield self._put(node.test, f"not ({self._text(node.test)})")

    _while = _if

    def _ifexp(self, node: ast.IfExp) -> Iterator[Edit]:
        yield self._put(node, f"({self._text(node.body)})")
        yield self._put(node, f"({self._text(node.orelse)})")

    def _comprehension(self, node: ast.comprehension) -> Iterator[Edit]:
        for test in node.ifs:
            yield self._put(test, "True")
            yield self._put(test, f"not ({self._text(test)})")

    def _constant(self, node: ast.Constant) -> Iterator[Edit]:
        match node.value:
            case bool():
                yield self._put(node, str(not node.value))
            case int():
                yield self._put(node, str(node.value + 1))
            case float():
                yield self._put(node, str(2 * node.value or 1.0))

    def _name(self, node: ast.Name) -> Iterator[Edit]:
        if node.id in NAMES:
            yield self._put(node, NAMES[node.id])

    def _call(self, node: ast.Call) -> Iterator[Edit]:
        """Leave out one keyword argument."""
        given: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
        parts = [self._at(part) for part in given]
        for index, keyword in enumerate(node.keywords, len(node.args)):
            if keyword.arg != "extra" and not _names_a_task(node, keyword):
                yield self._without(parts, index)

    def _dict(self, node: ast.Dict) -> Iterator[Edit]:
        """Leave out one entry."""
        parts = [
            (self._at(key)[0] if key else self._at(value)[0] - len("**"), self._at(value)[1])
            for key, value in zip(node.keys, node.values, strict=True)
        ]
        for index in range(len(parts)):
            yield self._without(parts, index)

    def _without(self, parts: list[tuple[int, int]], index: int) -> Edit:
        """One part of a list gone, with the comma that parts it from its neighbour."""
        start, end = parts[index]
        if index + 1 < len(parts):
            end = parts[index + 1][0]
        elif index:
            start = parts[index - 1][1]
        return Edit(start, end, "", self._raw.count(b"\n", 0, start) + 1)

    def _return(self, node: ast.Return) -> Iterator[Edit]:
        if node.value is not None and self._text(node.value) != "None":
            yield self._put(node, "return None")

    def _gone(self, node: ast.stmt) -> Iterator[Edit]:
        yield self._put(node, "pass")

    _raise = _continue = _break = _expr = _augassign = _gone

    def _assign(self, node: ast.Assign) -> Iterator[Edit]:
        if not all(isinstance(t, ast.Name) for t in node.targets):
            yield self._put(node, "pass")


def _is_silent(node: ast.AST) -> bool:
    """What no test should hold: wording, logs, assertions, types."""
    if isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Assign):
        return _is_type(node.value)
    if isinstance(node, ast.If):
        checks_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return checks_types or (not node.orelse and all(_is_silent(each) for each in node.body))
    if isinstance(node, ast.Expr):
        value = node.value
        return isinstance(value, ast.Constant) or (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Attribute)
            and isinstance(value.func.value, ast.Name)
            and value.func.value.id == "logger"
        )
    return False


def _names_a_task(call: ast.Call, keyword: ast.keyword) -> bool:
    """A task's name is for whoever debugs it."""
    made = isinstance(call.func, ast.Attribute) and call.func.attr == "create_task"
    return made and keyword.arg == "name"


def _is_type(value: ast.expr) -> bool:
    """`One | Other` and `Literal[1, 2]`, which mean something to a type checker only."""
    if isinstance(value, ast.Subscript):
        return isinstance(value.value, ast.Name) and value.value.id == "Literal"
    names = [n.id for n in ast.walk(value) if isinstance(n, ast.Name)]
    joined = isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr)
    return joined and all(n[:1].isupper() for n in names)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node that run: no annotations, no decorators."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
