"""The mutants of a file: its code with one small change.

Most operators are mutmut's. Left out are those whose mutants any test finds (`None` in place of a value) or
no user would notice (other text in a message). Added are a statement that is removed, a condition that is
always the other way, and a number that is 1,000 times as large or as small: the kinds of defects that slip
through. Docstrings, annotations, imports, log lines and `TYPE_CHECKING` have no mutants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

THOUSAND = 1000
SMALL = 10  # what is not below may be a duration or a size: one more makes no difference to anybody

Operator = Callable[[Any], Iterable[cst.CSTNode]]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one file. `line` counts from 1; `old` and `new` are the lines that differ."""

    file: str
    number: int  # among those of its file
    line: int
    kind: str
    old: str
    new: str
    code: str  # of the whole file

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.kind}"


def _one_more(node: cst.Integer) -> Iterator[cst.CSTNode]:
    if node.evaluated_value < SMALL:
        yield from mutators.operator_number(node)


def _scaled(node: cst.Integer | cst.Float) -> Iterator[cst.CSTNode]:
    if abs(value := node.evaluated_value) >= SMALL:
        yield node.with_changes(value=repr(value * THOUSAND))
        smaller = value // THOUSAND if isinstance(value, int) else value / THOUSAND
        yield node.with_changes(value=repr(smaller))


def _removed(node: cst.SimpleStatementLine) -> Iterator[cst.CSTNode]:
    """A call, a change in place, an assignment to an attribute or item, a deletion."""
    match node.body:
        case [cst.Expr(value=cst.Call() | cst.Await()) | cst.AugAssign() | cst.Del()]:
            pass
        case [cst.Assign(targets=[cst.AssignTarget(target=cst.Attribute() | cst.Subscript())])]:
            pass
        case _:
            return
    yield node.with_changes(body=[cst.Pass()])


def _never(node: cst.If) -> Iterator[cst.CSTNode]:
    yield node.with_changes(test=cst.Name("False"))
    if node.orelse is None:
        yield node.with_changes(test=cst.Name("True"))


def _fewer_arguments(node: cst.Call) -> Iterator[cst.CSTNode]:
    """Arguments with a keyword: most have a default."""
    for number, argument in enumerate(node.args):
        if argument.keyword is not None:
            yield node.with_changes(args=[*node.args[:number], *node.args[number + 1 :]])


def _swapped_extremes(node: cst.Call) -> Iterator[cst.CSTNode]:
    if isinstance(node.func, cst.Name) and node.func.value in ("min", "max"):
        other = "max" if node.func.value == "min" else "min"
        yield node.with_changes(func=cst.Name(other))


OPERATORS: list[tuple[type | tuple[type, ...], str, Operator]] = [
    (cst.Integer, "number", _one_more),
    ((cst.Integer, cst.Float), "unit", _scaled),
    (cst.Name, "flag", mutators.operator_name),
    (cst.AugAssign, "assigned", mutators.operator_augmented_assignment),
    (cst.UnaryOperation, "not", mutators.operator_remove_unary_ops),
    (cst.CSTNode, "keyword", mutators.operator_keywords),
    (cst.CSTNode, "operator", mutators.operator_swap_op),
    (cst.IfExp, "choice", mutators.operator_if_exp),
    (cst.SimpleStatementLine, "removed", _removed),
    (cst.If, "condition", _never),
    (cst.Call, "argument", _fewer_arguments),
    (cst.Call, "extreme", _swapped_extremes),
]


@cache
def _parsed(code: str) -> MetadataWrapper:
    return MetadataWrapper(cst.parse_module(code), unsafe_skip_copy=True)


@cache
def places(code: str) -> list[tuple[cst.CSTNode, str, cst.CSTNode]]:
    """Each node that has a mutant, the mutant's kind, and what takes the node's place."""
    return [
        (node, kind, changed)
        for node in _nodes(_parsed(code).module)
        for types, kind, operator in OPERATORS
        if isinstance(node, types)
        for changed in operator(node)
    ]


@cache
def lines(code: str) -> list[int]:
    """The line of each place."""
    positions = _parsed(code).resolve(PositionProvider)
    return [positions[node].start.line for node, _, _ in places(code)]


def mutant(file: str, code: str, number: int) -> Mutant | None:
    """The mutant with this number, from 0, of a file's code. None if it is no valid Python, or the same."""
    wrapper = _parsed(code)
    node, kind, changed = places(code)[number]
    new = cst.ensure_type(wrapper.module.deep_replace(node, changed), cst.Module).code
    try:
        compile(new, file, "exec")
    except SyntaxError:
        return None
    before, after = code.splitlines(), new.splitlines()
    if before == after:
        return None
    start = next(n for n, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1])
    end = next(
        n for n, pair in enumerate(zip(reversed(before), reversed(after), strict=False)) if pair[0] != pair[1]
    )
    line = wrapper.resolve(PositionProvider)[node].start.line
    old = "\n".join(before[start : len(before) - end])
    return Mutant(file, number, line, kind, old, "\n".join(after[start : len(after) - end]), new)


def _nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if _left_out(node):
        return
    yield node
    for child in node.children:
        yield from _nodes(child)


def _left_out(node: cst.CSTNode) -> bool:
    match node:
        case cst.Annotation() | cst.Import() | cst.ImportFrom() | cst.Decorator() | cst.Assert():
            return True
        case cst.If(test=cst.Name(value="TYPE_CHECKING")):
            return True
        case cst.Call(func=cst.Attribute(value=cst.Name(value="log"))):
            return True
        case cst.SimpleStatementLine(body=[cst.Expr(value=inner)]):
            text = isinstance(inner, cst.SimpleString | cst.ConcatenatedString)
            return text or (isinstance(inner, cst.Call) and _left_out(inner))
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))]):
            return name in ("__all__", "__slots__", "log")
    return False
