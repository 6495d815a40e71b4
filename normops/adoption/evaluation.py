"""Evaluates the statements and expressions of a Python function, one at a time.

:mod:`~.following` determines the results of calls, attributes and operators.
"""

import ast
import operator
from abc import ABCMeta
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from normops.adoption.reasons import Raises, refuse

if TYPE_CHECKING:
    from normops.adoption.following import Following

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}

# The number of fields of each kind of node. A newer Python may add a field, whose meaning is unknown here.
_FIELDS: dict[type[ast.AST], int] = {
    **{ast.Return: 1, ast.If: 3, ast.Assign: 3, ast.AnnAssign: 4, ast.AugAssign: 3, ast.Expr: 1, ast.Assert: 2},
    **{ast.Raise: 2, ast.Delete: 1, ast.Pass: 0, ast.Constant: 2, ast.Name: 2, ast.Attribute: 3, ast.Call: 3},
    **{ast.keyword: 2, ast.BinOp: 3, ast.UnaryOp: 2, ast.BoolOp: 2, ast.Compare: 3, ast.IfExp: 3, ast.Tuple: 2},
    **{ast.List: 2, ast.Starred: 2, ast.Subscript: 3, ast.Slice: 3, ast.GeneratorExp: 2, ast.comprehension: 4},
}


def _check_fields(node: ast.AST) -> None:
    fields = node.__match_args__
    if len(fields) != _FIELDS.get(type(node), len(fields)):
        refuse(f"has a {type(node).__name__} with {', '.join(fields)}, not all of which is known")


class Super(NamedTuple):
    """The value of ``super()`` in a method of this class."""

    cls: type


class Frame:
    """One call of a Python function."""

    def __init__(self, following: "Following", function: FunctionType, local: dict[str, Any]) -> None:
        self._following, self._function, self._local = following, function, local
        self._generates: dict[str, Any] = {}
        """The variables of generators, which are not among the function's locals."""

    def run(self, statements: Sequence[ast.stmt]) -> tuple[Any] | None:
        """Returns the value that the statements return, in a tuple; None if they do not return."""
        for statement in statements:
            _check_fields(statement)
            match statement:
                case ast.Return(value=value):
                    return (None if value is None else self.value_of(value),)
                case ast.If():
                    is_true = self._following.truth(self.value_of(statement.test))
                    if (returned := self.run(statement.body if is_true else statement.orelse)) is not None:
                        return returned
                case ast.Assign():
                    result = self.value_of(statement.value)
                    for target in statement.targets:
                        self._assign(target, result)
                case ast.AnnAssign(target=ast.Name()):
                    if statement.value is not None:
                        self._assign(statement.target, self.value_of(statement.value))
                case ast.AugAssign(target=ast.Name(id=name)):
                    before = self._name(name)
                    if isinstance(before, (Tensor, list)):
                        refuse(f"writes into a {type(before).__name__.lower()}")
                    self._local[name] = self._of_two(statement.op, before, statement.value)
                case ast.Expr():
                    self.value_of(statement.value)
                case ast.Assert():
                    if not self._following.truth(self.value_of(statement.test)):
                        raise Raises("AssertionError")
                case ast.Raise():
                    raise Raises(ast.unparse(statement))
                case ast.Delete(targets=[ast.Name(id=name)]) if name in self._local:
                    del self._local[name]
                case ast.Pass():
                    pass
                case _:
                    refuse(f"does something else than compute: {ast.unparse(statement).partition(chr(10))[0]}")
        return None

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self._local[name] = value
            case ast.Tuple(elts=targets) | ast.List(elts=targets) if type(value) in (tuple, list):
                stars = [i for i, each in enumerate(targets) if isinstance(each, ast.Starred)]
                if stars and len(value) >= len(targets) - 1:
                    end = stars[0] + len(value) - len(targets) + 1
                    value = [*value[: stars[0]], list(value[stars[0] : end]), *value[end:]]
                    targets = [getattr(each, "value", each) for each in targets]
                if len(targets) != len(value):
                    raise Raises("cannot unpack")
                for each, part in zip(targets, value, strict=True):
                    self._assign(each, part)
            case _:
                refuse(f"assigns {ast.unparse(target)}")

    def value_of(self, expression: ast.expr) -> Any:
        """Returns the value of an expression."""
        following = self._following
        _check_fields(expression)
        match expression:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._name(name)
            case ast.Attribute(value=value, attr=name):
                return following.attribute(self.value_of(value), name)
            case ast.Call():
                return self._call(expression)
            case ast.BinOp(left=left, right=right):
                return self._of_two(expression.op, self.value_of(left), right)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not following.truth(self.value_of(operand))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return following.computed(operator.neg, (self.value_of(operand),))
            case ast.BoolOp(op=ast.And() | ast.Or() as sign, values=values):
                for each in values:
                    value = self.value_of(each)
                    if each is not values[-1] and following.truth(value) is isinstance(sign, ast.Or):
                        break
                return value
            case ast.Compare(left=left):
                return self._compared(expression)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.value_of(body if following.truth(self.value_of(test)) else orelse)
            case ast.Tuple(elts=elements):
                return tuple(self._elements(elements))
            case ast.List(elts=elements):
                return list(self._elements(elements))
            case ast.Subscript(value=value, slice=index):
                return following.item(self.value_of(value), self.value_of(index))
            case ast.GeneratorExp(elt=element, generators=[ast.comprehension(target=ast.Name(id=name)) as each]):
                return self._generated(element, name, each)
            case ast.Slice(lower=lower, upper=upper, step=step):
                return slice(*[None if each is None else self.value_of(each) for each in (lower, upper, step)])
        return refuse(f"has the expression {type(expression).__name__}: {ast.unparse(expression)}")

    def _generated(self, element: ast.expr, name: str, each: ast.comprehension) -> list[Any]:
        """Returns all values of a generator expression over a tuple that has no conditions."""
        _check_fields(each)
        values = self.value_of(each.iter)
        if each.ifs or each.is_async or type(values) is not tuple or name in self._generates:
            refuse(f"has the expression GeneratorExp: {ast.unparse(element)}")
        found = []
        for value in values:
            self._generates[name] = value
            found.append(self.value_of(element))
        self._generates.pop(name, None)
        return found

    def _of_two(self, sign: ast.operator, left: Any, right: ast.expr) -> Any:
        function = _BINARY.get(type(sign)) or refuse(f"has the operator {type(sign).__name__}")
        return self._following.binary(function, left, self.value_of(right))

    def _elements(self, elements: Sequence[ast.expr]) -> Iterator[Any]:
        for element in elements:
            if isinstance(element, ast.Starred):
                _check_fields(element)
                value = self.value_of(element.value)
                if type(value) not in (tuple, list):
                    refuse(f"unpacks a {type(value).__name__}")
                yield from value
            else:
                yield self.value_of(element)

    def _compared(self, expression: ast.Compare) -> Any:
        value = self.value_of(expression.left)
        result: Any = True
        for comparison, right in zip(expression.ops, expression.comparators, strict=True):
            other = self.value_of(right)
            compare = _COMPARISONS.get(type(comparison)) or refuse(f"has the operator {type(comparison).__name__}")
            result = self._following.compared(compare, value, other)
            if not self._following.truth(result):
                break
            value = other
        return result

    def _name(self, name: str) -> Any:
        if name in self._generates:
            return self._generates[name]
        code = self._function.__code__
        if name in code.co_varnames or name in code.co_cellvars:
            if name not in self._local:
                raise Raises(f"UnboundLocalError: {name}")
            return self._local[name]
        if name in code.co_freevars:
            cell = (self._function.__closure__ or ())[code.co_freevars.index(name)]
            try:
                value = cell.cell_contents
            except ValueError as error:
                raise Raises(f"NameError: {name}") from error
            return self._following.read(cell, "cell_contents", value, name)
        space = self._function.__globals__
        built_in = self._function.__builtins__  # type: ignore[attr-defined, unused-ignore]  # mypy's cache lacks it
        if name.startswith("__") or type(space) is not dict or type(built_in) is not dict:
            refuse(f"reads {name}, which is neither its own nor a module's")
        if name in space:
            return self._following.read(space, name, space[name])
        if name not in built_in:
            refuse(f"reads {name}, which is not defined")
        return self._following.judged(built_in[name], name)

    def _call(self, call: ast.Call) -> Any:
        function = self.value_of(call.func)
        if function is super:
            return self._super(call)
        args = list(self._elements(call.args))
        for keyword in call.keywords:
            _check_fields(keyword)
            if type(keyword) is not ast.keyword or keyword.arg is None:
                refuse("calls with ** of something")
        kwargs = {str(keyword.arg): self.value_of(keyword.value) for keyword in call.keywords}
        return self._following.call(function, args, kwargs)

    def _super(self, call: ast.Call) -> Super:
        if call.args or call.keywords or not call.func or not isinstance(call.func, ast.Name):
            args = list(self._elements(call.args))
        else:
            args = [self._name("__class__"), self._local[self._function.__code__.co_varnames[0]]]
        if len(args) != 2 or args[1] is not self._following.module or not is_plain_class(args[0]):
            refuse("calls super")
        if args[0] not in type(self._following.module).__mro__[:-1]:
            raise Raises("super: not a subclass")
        return Super(args[0])


def is_plain_class(value: Any) -> bool:
    """Returns whether a value is a class with Python's default attribute lookup."""
    return type(value) in (type, ABCMeta)
