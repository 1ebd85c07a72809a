"""Questions about the graph of a program, asked of a networkx view that is built when one is asked.

The IR keeps no use lists: ops stand in order, and passes rebuild. networkx is imported here alone,
inside the functions, so that commands which ask nothing start fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from archir.ir import Function, Module, Op, Ref, Value

if TYPE_CHECKING:
    import networkx

    Graph = networkx.MultiDiGraph[Any]


def dataflow(function: Function) -> Graph:
    """The graph of a function: who makes what for whom.

    Nodes: input and field values, ops, and the function itself as the reader of its outputs.
    Edges: from maker to reader, `place` = (number of the result, number of the operand).
    """
    import networkx

    graph = networkx.MultiDiGraph()
    makers: dict[Value, tuple[Any, int]] = {}
    for value in (*function.inputs, *(f.value for f in function.fields)):
        graph.add_node(value)
        makers[value] = (value, 0)
    for node in (*function.ops, function):
        graph.add_node(node)
        operands = node.operands if isinstance(node, Op) else node.outputs
        for at, operand in enumerate(operands):
            if isinstance(operand, Value):
                maker, number = makers[operand]
                graph.add_edge(maker, node, place=(number, at))
        if isinstance(node, Op):
            makers.update({value: (node, i) for i, value in enumerate(node.results)})
    return graph


def reaches(function: Function, value: Value) -> frozenset[Value]:
    """Every value that `value` is computed from: inputs, fields and results."""
    import networkx

    graph = dataflow(function)
    start = next((op for op in function.ops if value in op.results), value)
    found: set[Value] = set()
    for node in networkx.ancestors(graph, start):
        found |= set(node.results) if isinstance(node, Op) else {node}
    return frozenset(found)


def can_fuse(function: Function, group: Iterable[Op]) -> bool:
    """Whether ops can become one op: no path leaves the group and comes back."""
    import networkx

    graph, inside = dataflow(function), set(group)
    leaving = {reader for op in inside for reader in graph.successors(op)} - inside
    return all(inside.isdisjoint(networkx.descendants(graph, node)) for node in leaving)


def alike(a: Module, b: Module) -> bool:
    """Whether two modules are the same program up to names of values and functions, and up to the
    order of ops that do not depend on each other. Field paths and scopes are not names: they count.
    """
    known: list[Graph] = []
    return _class_of(a, known) == _class_of(b, known)


def _class_of(module: Module, known: list[Graph]) -> int:
    """The number of the class of the entry; functions are alike when their numbers are equal."""
    from networkx.algorithms.isomorphism import (
        MultiDiGraphMatcher,
        categorical_multiedge_match,
        categorical_node_match,
    )

    by_label = categorical_node_match("label", None)
    by_place = categorical_multiedge_match("place", None)
    classes: dict[str, int] = {}
    for function in module.functions:
        graph = _labelled(function, classes)
        for number, other in enumerate(known):
            same = _labels(graph) == _labels(other)
            if same and MultiDiGraphMatcher(graph, other, by_label, by_place).is_isomorphic():
                classes[function.name] = number
                break
        else:
            classes[function.name] = len(known)
            known.append(graph)
    return classes[module.entry.name]


def _labels(graph: Graph) -> Counter[int]:
    return Counter(graph.nodes[node]["label"] for node in graph)


def _labelled(function: Function, classes: dict[str, int]) -> Graph:
    """The dataflow graph with a label on each node: what it is, and the labels it is made from.

    Equal labels mean equal computations, so matching has almost nothing left to search.
    """
    graph = dataflow(function)
    labels: dict[Any, int] = {}

    def label(node: Any, *what: Any) -> None:
        made_from = sorted(
            (place, labels[maker]) for maker, _, place in graph.in_edges(node, data="place")
        )
        labels[node] = hash((*map(str, what), *made_from))
        graph.nodes[node]["label"] = labels[node]

    def attrs(found: Any) -> list[tuple[str, Any]]:
        pairs = sorted(found.items())
        return [(k, classes[v.name] if isinstance(v, Ref) else repr(v)) for k, v in pairs]

    for at, value in enumerate(function.inputs):
        label(value, "input", at, value.type)
    for field in function.fields:
        label(field.value, field.kind, field.path, field.value.type, attrs(field.attrs))
    for op in function.ops:
        numbers = [(i, x) for i, x in enumerate(op.operands) if not isinstance(x, Value)]
        label(op, op.kind, numbers, [v.type for v in op.results], attrs(op.attrs))
    label(function, function.role, function.names, attrs(function.attrs))
    return graph
