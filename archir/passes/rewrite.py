"""How passes rebuild functions: op by op, callees first, with every type inferred anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from archir import ir
from archir.diagnostics import Loc
from archir.ir import Field, Function, Module, Op, Operand, Value
from archir.ops import infer_op
from archir.text import print_function
from archir.types import Tensor, Type


class Rewriter:
    """A function being rebuilt: `values` maps each old value to its new one."""

    def __init__(self, old: Function, functions: dict[str, Function]) -> None:
        self.old, self.functions = old, functions
        self.values: dict[Value, Value] = {}
        self.inputs: list[Value] = []
        self.fields: list[Field] = []
        self.ops: list[Op] = []
        self._taken = {v.name for v in (*old.inputs, *(f.value for f in old.fields))}
        self._taken |= {v.name for op in old.ops for v in op.results}

    def fresh(self, hint: str) -> str:
        """A name no value of the old or new function has: `q`, `q_1`, `q_2` for q, q, q_1."""
        base, ordinal = ir.identifier(hint), 0
        stem, _, number = base.rpartition("_")
        base = stem if number.isdigit() and stem in self._taken else base
        name = base
        while name in self._taken:
            ordinal += 1
            name = f"{base}_{ordinal}"
        self._taken.add(name)
        return name

    def input(self, hint: str, type_: Type) -> Value:
        """A new input after those so far."""
        value = Value(self.fresh(hint), type_)
        self.inputs.append(value)
        return value

    def field(self, kind: str, path: str, type_: Type, /, **attrs: Any) -> Value:
        """A new field; its value."""
        value = Value(self.fresh(path), type_)
        self.fields.append(Field(kind, path, value, attrs))
        return value

    def keep_signature(self, change: Callable[[Value], Type] | None = None) -> None:
        """Inputs and fields of the old function, with changed types where wanted."""
        for value in self.old.inputs:
            self.inputs.append(self._moved(value, change))
        for field in self.old.fields:
            self.fields.append(replace(field, value=self._moved(field.value, change)))

    def _moved(self, value: Value, change: Callable[[Value], Type] | None) -> Value:
        new = replace(value, type=change(value)) if change else value
        self.values[value] = new
        return new

    def __getitem__(self, operand: Operand) -> Operand:
        """The new operand for an old one."""
        return self.values[operand] if isinstance(operand, Value) else operand

    def value(self, old: Value) -> Value:
        """The new value for an old one."""
        return self.values[old]

    def emit(
        self, kind: str, *operands: Operand, hint: str = "", loc: Loc | None = None, **attrs: Any
    ) -> Any:
        """A new op with fresh results: one value, a tuple, or None."""
        draft = Op(kind, operands, (), attrs, loc)
        made = tuple(
            Value(self.fresh(hint or kind), t, loc) for t in infer_op(draft, self.functions)
        )
        self.ops.append(replace(draft, results=made))
        return made[0] if len(made) == 1 else made or None

    def to_dtype(self, x: Operand, dtype: str, loc: Loc | None = None) -> Operand:
        """The value itself where it has this dtype, or a number; else cast to it."""
        if not isinstance(x, Value) or not isinstance(x.type, Tensor) or x.type.dtype == dtype:
            return x
        return self.emit("cast", x, dtype=dtype, hint=x.name, loc=loc)

    def add_function(self, function: Function) -> str:
        """The name of an equal function that the module has already, or of this one, added."""
        name, ordinal = function.name, 0
        while name in self.functions:
            twin = replace(function, name=name)
            if print_function(self.functions[name], False) == print_function(twin, False):
                return name
            ordinal += 1
            name = f"{function.name}_{ordinal}"
        self.functions[name] = replace(function, name=name)
        return name

    def inline(
        self, function: Function, given: tuple[Operand, ...], loc: Loc | None = None
    ) -> list[Operand]:
        """The ops of a function of scalars on new operands, and what it returns."""
        values: dict[Value, Operand] = {}
        for value, operand in zip(function.inputs, given, strict=True):
            assert isinstance(value.type, Tensor)
            values[value] = self.to_dtype(operand, value.type.dtype, loc)
        for op in function.ops:
            operands = tuple(values[x] if isinstance(x, Value) else x for x in op.operands)
            made = self.emit(op.kind, *operands, hint=op.results[0].name, loc=op.loc, **op.attrs)
            made = made if isinstance(made, tuple) else (made,)
            values.update(zip(op.results, made, strict=True))
        return [values[v] for v in function.outputs]

    def copy(
        self,
        op: Op,
        operands: tuple[Operand, ...] | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> tuple[Value, ...]:
        """The op again on new operands; its results keep their names, their types are inferred."""
        given = operands if operands is not None else tuple(self[x] for x in op.operands)
        draft = replace(op, operands=given, attrs=dict(op.attrs if attrs is None else attrs))
        inferred = infer_op(draft, self.functions)
        results = tuple(
            replace(value, type=type_) for value, type_ in zip(op.results, inferred, strict=False)
        )
        extra = tuple(
            Value(self.fresh(f"{op.kind}_state"), type_, op.loc)
            for type_ in inferred[len(results) :]
        )
        self.ops.append(replace(draft, results=results + extra))
        self.values.update(zip(op.results, results, strict=True))
        return results + extra

    def finish(self, **changes: Any) -> Function:
        """The new function."""
        outputs = tuple(self.value(v) for v in self.old.outputs)
        return replace(
            self.old,
            **{
                "inputs": tuple(self.inputs),
                "fields": tuple(self.fields),
                "ops": tuple(self.ops),
                "outputs": outputs,
                **changes,
            },
        )


def rewrite(module: Module, visit: Callable[[Rewriter, Op], bool]) -> Module:
    """Rebuilds every function; `visit` handles an op and says so, or has it copied."""
    functions: dict[str, Function] = {}
    for function in module.functions:
        new = Rewriter(function, functions)
        new.keep_signature()
        for op in function.ops:
            if not visit(new, op):
                new.copy(op)
        functions[function.name] = new.finish()
    return Module(ir.callees_first(functions, module.entry.name))
