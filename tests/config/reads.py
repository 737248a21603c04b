"""Which keys of the typed sections some sources read.

Names alone do not tell: `window` is a key of two sections and an attribute of much else. So each read is followed to
its section by what is declared of arguments, attributes and results, about as far as a reader of the code would look.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable

Names = frozenset[str]  # of classes
NONE: Names = frozenset()


def reads(sources: Iterable[str]) -> set[tuple[str, str]]:
    """All (class, attribute) pairs that the sources read, for classes that they define."""
    trees = [ast.parse(source) for source in sources]
    reader = _Reader(trees)
    for _ in range(2):  # what methods keep in `self` is known to those before them, and to other classes, the next time
        for tree in trees:
            reader.names = {}
            reader.visit(tree)
    return reader.found


class _Reader(ast.NodeVisitor):
    """
    attributes: class -> attribute -> classes of what it holds.
    results: function or method -> classes of what it returns.
    names: variable -> classes of what it holds, where the visit has come to.
    """

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.found: set[tuple[str, str]] = set()
        self.names: dict[str, Names] = {}
        self.attributes: dict[str, dict[str, Names]] = {}
        self.bases: dict[str, list[str]] = {}
        self.results: dict[str, Names] = defaultdict(frozenset)
        nodes = [node for tree in trees for node in ast.walk(tree)]
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        self.classes = frozenset(node.name for node in classes)
        for node in classes:
            self.attributes[node.name] = defaultdict(frozenset)
            self.bases[node.name] = [ast.unparse(base).split(".")[-1] for base in node.bases]
        for node in classes:
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    self.attributes[node.name][item.target.id] = self._declared(item.annotation)
                if isinstance(item, ast.FunctionDef) and any(ast.unparse(d) == "property" for d in item.decorator_list):
                    self.attributes[node.name][item.name] = self._declared(item.returns)
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                self.results[node.name] |= self._declared(node.returns)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outside = self.names
        self.names = {**outside, "self": frozenset({node.name})}
        self.generic_visit(node)
        self.names = outside

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = self.names
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self.names = {**outside, **{a.arg: self._declared(a.annotation) for a in arguments if a.arg != "self"}}
        self.generic_visit(node)
        self.names = outside

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._hold(node.target, self._declared(node.annotation))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._assign(node.target, node.value)

    def visit_For(self, node: ast.For) -> None:
        self._hold(node.target, self._classes(node.iter))
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._hold(node.target, self._classes(node.iter))
        self.generic_visit(node)

    def _comprehended(self, node: ast.AST) -> None:
        for generator in node.generators:  # type: ignore[attr-defined]
            self.visit(generator)  # before what is made of it
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehended

    def visit_Constant(self, node: ast.Constant) -> None:
        pass  # most nodes are these and names, which hold nothing to visit

    def visit_Name(self, node: ast.Name) -> None:
        pass

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load):
            self.found |= {(name, node.attr) for name in self._classes(node.value)}
        self.generic_visit(node)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._assign(one, its)
        else:
            self._hold(target, self._classes(value))

    def _hold(self, target: ast.expr, classes: Names) -> None:
        if isinstance(target, ast.Tuple):
            for part in target.elts:
                self._hold(part, classes)
        elif isinstance(target, ast.Name):
            self.names[target.id] = classes
        elif isinstance(target, ast.Attribute):
            for owner in self._classes(target.value):
                self.attributes[owner][target.attr] |= classes

    def _classes(self, node: ast.expr) -> Names:
        """The classes of what an expression may be, of its items if it is a collection; none if that is not known."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, NONE)
        if isinstance(node, ast.Attribute):
            return self._union(self._attribute(owner, node.attr) for owner in self._classes(node.value))
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in self.attributes:
                return frozenset({name})
            if name in self.results:
                return self.results[name]
            return self._union(map(self._classes, node.args))  # zip, enumerate, replace and the like
        if isinstance(node, ast.Subscript | ast.Starred):
            return self._classes(node.value)
        if isinstance(node, ast.NamedExpr):
            return self._classes(node.value)
        if isinstance(node, ast.IfExp):
            return self._classes(node.body) | self._classes(node.orelse)
        if isinstance(node, ast.BoolOp):
            return self._union(map(self._classes, node.values))
        if isinstance(node, ast.List | ast.Tuple):
            return self._union(map(self._classes, node.elts))
        return NONE

    def _attribute(self, owner: str, name: str) -> Names:
        own = self.attributes.get(owner, {})
        return own[name] if name in own else self._union(self._attribute(b, name) for b in self.bases.get(owner, ()))

    def _declared(self, annotation: ast.expr | None) -> Names:
        words = re.findall(r"\w+", ast.unparse(annotation)) if annotation is not None else []
        return self.classes & set(words)

    @staticmethod
    def _union(several: Iterable[Names]) -> Names:
        return frozenset().union(*several)
