"""Nodes of the tree of trajectories: walking down them by text, and growing them by tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from slime.router.middleware_hub.token_runs import TokenRun, joined


class Node:
    """A node, and the edge that leads to it.

    Attributes:
        run: the tokens of that edge.
        stamp: when something that passes through here was inserted last.
        ends: when the trajectory that ends here was inserted; 0 if none does.
        version: of the weights that made that trajectory.
    """

    __slots__ = ("_children", "ends", "parent", "run", "stamp", "version")

    def __init__(self, run: TokenRun, parent: "Node | None", stamp: int = 0) -> None:
        self.run, self.parent, self.stamp = run, parent, stamp
        self.ends = 0
        self.version: int | None = None
        # By the length of their first piece of text, then by that; two of one text may have other tokens.
        self._children: dict[int, dict[str, list[Node]]] = {}

    @property
    def has_children(self) -> bool:
        return bool(self._children)

    @property
    def depth(self) -> int:
        """Edges from the root."""
        return sum(1 for _ in self.with_ancestors()) - 1

    @property
    def children(self) -> list["Node"]:
        return [
            child for pieces in self._children.values() for siblings in pieces.values() for child in siblings
        ]

    def candidates(self, text: str, position: int) -> Iterator["Node"]:
        """Children whose first piece of text stands at the position; no piece of others' edges can."""
        for length, pieces in self._children.items():
            yield from pieces.get(text[position : position + length], ())

    def beginning_as(self, run: TokenRun) -> list["Node"]:
        """Children whose first piece of text is that of the run."""
        piece = run.first_piece
        return list(self._children.get(len(piece), {}).get(piece, ()))

    def with_ancestors(self) -> Iterator["Node"]:
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def subtree(self) -> Iterator["Node"]:
        """This node and all below it, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children

    def add(self, child: "Node") -> None:
        child.parent = self
        piece = child.run.first_piece
        self._children.setdefault(len(piece), {}).setdefault(piece, []).append(child)

    def detach(self) -> "Node":
        """Takes the node off its parent, which is returned."""
        parent, piece = self.parent, self.run.first_piece
        assert parent is not None, "the root stays"
        pieces = parent._children[len(piece)]
        pieces[piece].remove(self)
        if not pieces[piece]:
            del pieces[piece]
        if not pieces:
            del parent._children[len(piece)]
        return parent

    def split(self, count: int) -> "Node":
        """Puts a node after the first ``count`` tokens of the edge, and returns it."""
        upper = Node(self.run.head(count), None, self.stamp)
        parent = self.detach()
        parent.add(upper)
        self.run = self.run.tail(count)
        upper.add(self)
        return upper

    def merge_only_child(self) -> None:
        """Undoes a split that nothing needs any more: an only child takes this node's place."""
        if len(children := self.children) == 1:
            (child,) = children
            parent = self.detach()
            child.run = joined([self.run, child.run])
            parent.add(child)


@dataclass
class Match:
    """How far a text is known.

    Attributes:
        node: the last node of which tokens are part of it, and ``tokens`` how many.
        length: characters of the text that they and those before them make.
        complete: nodes where a trajectory with exactly this text ends; the latest is ``node``.
    """

    node: Node
    tokens: int = 0
    length: int = 0
    complete: list[Node] = field(default_factory=list)

    def run(self) -> TokenRun:
        above = [node.run for node in self.node.with_ancestors()][1:]
        return joined([*reversed(above), self.node.run.head(self.tokens)])


def descend(root: Node, text: str) -> Match:
    """The longest match of a text, and of several the one that was inserted last."""
    best, rank = Match(root), (0, 0, 0)
    waiting = [(root, 0)]  # nodes whose edge the text has gone along, and how far into the text
    complete: list[Node] = []
    while waiting:
        node, position = waiting.pop()
        ends = node.ends if position == len(text) else 0
        if ends:
            complete.append(node)
        if (position, ends, node.stamp) > rank:
            best, rank = Match(node, len(node.run), position), (position, ends, node.stamp)
        for child in node.candidates(text, position):
            after = position + len(child.run.text)
            if text.startswith(child.run.text, position):
                waiting.append((child, after))
                continue
            tokens = child.run.tokens_within(common_length(child.run.text, text, position))
            reached = position + len(child.run.head(tokens).text) if tokens else position
            if tokens and (reached, 0, child.stamp) > rank:
                best, rank = Match(child, tokens, reached), (reached, 0, child.stamp)
    best.complete = complete
    return best


def common_length(label: str, text: str, position: int) -> int:
    """How many characters of the label stand in the text at the position; by bisection."""
    low, high = 0, min(len(label), len(text) - position)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(label[low:middle], position + low):
            low = middle
        else:
            high = middle - 1
    return low


class Grown(NamedTuple):
    """The place where a run has been put: its last node, and how many of its tokens were there before."""

    node: Node
    shared: int


def node_at(root: Node, run: TokenRun, stamp: int) -> Grown:
    """The node that ends exactly this run, made where it is not there yet, as one of a trajectory."""
    node, rest = root, run
    while len(rest):
        step = next(_sharing(node, rest), None)
        if step is None:
            node.add(child := Node(rest, node, stamp))
            child.ends = stamp
            return Grown(child, len(run) - len(rest))
        child, shared = step
        node = child if shared == len(child.run) else child.split(shared)
        node.stamp = stamp
        rest = rest.tail(shared)
    node.ends = stamp
    return Grown(node, len(run))


def _sharing(node: Node, rest: TokenRun) -> Iterator[tuple[Node, int]]:
    """Children that begin with the same tokens, and with how many."""
    for child in node.beginning_as(rest):
        if shared := child.run.shared_with(rest):
            yield child, shared
