"""An explicit-state model checker: it visits every state of a small model and checks the invariants in each.

A model has hashable states and `Transition`s, which map a state to those that may follow. States are visited
breadth first, so the first broken invariant comes with a shortest story. A crash is tried in every state, up
to the bound on crashes. The explorer also checks that the model can complete from every state without another
fault, so the protocol never gets stuck. `never_taken` finds transitions that no exploration took.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
Steps = Iterable[tuple[str, S]]  # what happens, in words, and the state after it


@dataclass(frozen=True)
class Transition(Generic[S]):
    """One kind of step. `code` names the functions that it stands for, as `module:Class.method`."""

    name: str
    steps: Callable[[S], Steps[S]]
    code: tuple[str, ...] = ()
    fault: bool = False  # a failure of the environment; the protocol must complete without it
    crash: bool = False  # a fault that counts against the bound on crashes

    @property
    def does(self) -> str:
        """What the step does: the first line of its function's docstring."""
        return (self.steps.__doc__ or "").strip().partition("\n")[0]


@dataclass(frozen=True)
class Invariant(Generic[S]):
    """A property of every state (`holds`) or of every step (`keeps`), and why it is true."""

    says: str
    why: str
    holds: Callable[[S], bool] = lambda state: True
    keeps: Callable[[S, S], bool] | None = None


class Model(Protocol[S]):
    """The interface of a model."""

    transitions: Sequence[Transition[S]]
    invariants: Sequence[Invariant[S]]

    def begins(self) -> Iterable[S]:
        """The first states."""

    def is_over(self, state: S) -> bool:
        """Whether the protocol has completed."""


class Explored(NamedTuple):
    """How much was visited. `taken` counts the steps of each transition."""

    states: int
    steps: int
    depth: int
    taken: Counter[str]


class Violation(AssertionError):  # noqa: N818 # named for what happened
    """An invariant is broken. The text is a shortest sequence of steps to it."""

    def __init__(self, broken: str, story: Sequence[str], state: object) -> None:
        lines = [f"{number:3}. {line}" for number, line in enumerate(story, 1)]
        super().__init__("\n".join([f"broken: {broken}", *lines]))
        self.broken, self.story, self.state = broken, story, state


class _Node(NamedTuple, Generic[S]):
    state: S
    crashes: int


def explore(model: Model[S], crashes: int, *, most: int = 1_000_000) -> Explored:
    """Visit every state that is reached with at most `crashes` crashes.

    Raises Violation if an invariant is broken, and OverflowError if there are more than `most` states.
    """
    always = [one for one in model.invariants if one.keeps is None]
    over_steps = [(one, one.keeps) for one in model.invariants if one.keeps is not None]
    nodes: list[_Node[S]] = []
    numbers: dict[_Node[S], int] = {}
    came: list[tuple[int, str]] = []  # the node before, and the step from it
    depths: list[int] = []
    before: list[list[int]] = []  # the nodes from which a node is reached without a fault
    taken: Counter[str] = Counter()

    def story(number: int) -> list[str]:
        lines: list[str] = []
        while number >= 0:
            number, line = came[number]
            lines.append(line)
        return lines[::-1]

    def visit(node: _Node[S], origin: int, does: str) -> int:
        number = numbers.setdefault(node, len(nodes))
        if number < len(nodes):
            return number
        if number >= most:
            raise OverflowError(f"more than {most} states")
        nodes.append(node)
        came.append((origin, does))
        depths.append(depths[origin] + 1 if origin >= 0 else 0)
        before.append([])
        for one in always:
            if not one.holds(node.state):
                raise Violation(one.says, story(number), node.state)
        return number

    for state in model.begins():
        visit(_Node(state, 0), -1, "begin")
    at = 0
    while at < len(nodes):
        state, used = nodes[at]
        for transition in model.transitions:
            if transition.crash and used == crashes:
                continue
            for does, after in transition.steps(state):
                number = visit(_Node(after, used + transition.crash), at, does)
                taken[transition.name] += 1
                if not transition.fault and not transition.crash:
                    before[number].append(at)
                for one, keeps in over_steps:
                    if not keeps(state, after):
                        raise Violation(one.says, [*story(at), does], after)
        at += 1

    ends = [number for number, node in enumerate(nodes) if model.is_over(node.state)]
    good = set(ends)
    while ends:
        for number in before[ends.pop()]:
            if number not in good:
                good.add(number)
                ends.append(number)
    for number, node in enumerate(nodes):
        if number not in good:
            raise Violation("the protocol can always complete", story(number), node.state)
    return Explored(len(nodes), sum(taken.values()), max(depths), taken)


def never_taken(model: Model[S], explored: Sequence[Explored]) -> list[str]:
    """Return the transitions that none of these explorations took."""
    taken = sum((one.taken for one in explored), Counter[str]())
    return [transition.name for transition in model.transitions if not taken[transition.name]]
