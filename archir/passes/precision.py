"""precision(dtype): abstract floats become concrete, and every change of dtype an explicit cast.

    g: F[…] = mul(a_log_F, z_f)                      (f = bf16)
  → z_1: f32[…] = cast(z, dtype="f32");  g: f32[…] = mul(a_log, z_1)

Mixed operands of elementwise ops meet in the widest dtype. State updates run in max(float32,
dtype): their operands are cast, and for an operand with a bounded domain (a decay, a strength) the
cast moves back through the elementwise ops that made it. `param_dtype` and `state_dtype`
(of matrix states) change what is stored, with a cast where it is read or written (D10).
"""

from __future__ import annotations

from dataclasses import replace

from archir import ir, types
from archir.ir import Field, Function, Module, Op, Operand, Value
from archir.ops import lookup
from archir.ops.state import state_axes
from archir.passes.rewrite import Rewriter
from archir.types import List, Tensor, Type


def precision(
    module: Module,
    dtype: str = "float32",
    param_dtype: str | None = None,
    state_dtype: str | None = None,
) -> Module:
    """Makes every dtype concrete; see the module's docstring."""
    model = types.short_dtype(dtype)
    stored = {
        "weight": types.short_dtype(param_dtype or dtype),
        "buffer": types.short_dtype(param_dtype or dtype),
        "matrix": types.short_dtype(state_dtype) if state_dtype else None,
    }
    functions: dict[str, Function] = {}
    for function in module.functions:
        functions[function.name] = _Precision(function, functions, model, stored).run()
    return Module(ir.callees_first(functions, module.entry.name))


class _Precision(Rewriter):
    def __init__(
        self,
        old: Function,
        functions: dict[str, Function],
        model: str,
        stored: dict[str, str | None],
    ) -> None:
        super().__init__(old, functions)
        self.model, self.wide, self.stored = model, types.resolve("F", model), stored
        self.widened = _widened(old, functions)
        self.casts: dict[tuple[Value, str], Value] = {}

    def concrete(self, type_: Type) -> Type:
        match type_:
            case Tensor(dtype=dtype):
                return type_.with_dtype(types.resolve(dtype, self.model))
            case List(count=count, element=element):
                return List(count, element.with_dtype(types.resolve(element.dtype, self.model)))
        return type_

    def run(self) -> Function:
        for value in self.old.inputs:
            self.inputs.append(self._moved(value, lambda v: self.concrete(v.type)))
        for field in self.old.fields:
            computed = self.concrete(field.value.type)
            kept = self._stored_type(field)
            value = replace(field.value, type=kept)
            self.fields.append(replace(field, value=value))
            self.values[field.value] = value
            if kept != computed and isinstance(computed, Tensor):
                self.values[field.value] = self.cast(value, computed.dtype)
        for op in self.old.ops:
            self._op(op)
        return self.finish()

    def _stored_type(self, field: Field) -> Type:
        type_, asked = field.value.type, self.stored.get(field.attrs.get("kind", field.kind))
        if not isinstance(type_, Tensor) or not types.is_float(type_.dtype) or asked is None:
            return self.concrete(type_)
        if field.kind == "state":
            return type_.with_dtype(asked)
        return type_.with_dtype(types.resolve(type_.dtype, asked))

    def to(self, value: Operand, dtype: str) -> Operand:
        """The value in a dtype: itself, or one cast made for all that ask."""
        if not isinstance(value, Value) or not isinstance(value.type, Tensor):
            return value
        return value if value.type.dtype == dtype else self.cast(value, dtype)

    def cast(self, value: Value, dtype: str) -> Value:
        if (value, dtype) not in self.casts:
            made = self.emit("cast", value, dtype=dtype, hint=value.name, loc=value.loc)
            self.casts[value, dtype] = made
        return self.casts[value, dtype]

    def _op(self, op: Op) -> None:
        operands = tuple(self[x] for x in op.operands)
        attrs = dict(op.attrs)
        family = lookup(op.kind).family
        if op.kind == "cast":
            attrs["dtype"] = types.resolve(attrs["dtype"], self.model)
            (value,) = operands
            if isinstance(value, Value) and value.type.dtype == attrs["dtype"]:  # type: ignore[union-attr]
                self.values[op.result] = value
                return
        elif op.kind == "state_update":
            operands = tuple(self.to(x, self.wide) if isinstance(x, Value) else x for x in operands)
        elif op.kind == "store":
            field = next(f for f in self.fields if f.path == attrs["path"])
            if isinstance(field.value.type, Tensor) and field.kind == "state":
                operands = (self.to(operands[0], field.value.type.dtype),)
        elif lookup(op.kind).made:
            attrs["dtype"] = types.resolve(attrs.get("dtype", "F"), self.model)
        elif family == "elementwise" or op.kind == "pointwise":
            operands = self._meet(op, operands)
        self.copy(op, operands, attrs)

    def _meet(self, op: Op, operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        """Operands of an elementwise op in one dtype."""
        floats = [
            x.type.dtype
            for x in operands
            if isinstance(x, Value) and isinstance(x.type, Tensor) and types.is_float(x.type.dtype)
        ]
        result = op.results[0].type
        assert isinstance(result, Tensor)
        if op.results[0] in self.widened:
            target = self.wide
        elif floats:
            target = types.promote(*floats)
        elif types.is_float(result.dtype):
            target = self.wide
        else:
            return operands

        def meet(x: Operand) -> Operand:
            if isinstance(x, Value) and isinstance(x.type, Tensor):
                mixes = types.is_float(x.type.dtype) or (not floats and x.type.dtype != "bool")
                return self.to(x, target) if mixes else x
            return x

        return tuple(meet(x) for x in operands)


def _widened(function: Function, functions: dict[str, Function]) -> set[Value]:
    """Results of elementwise ops read only by the bounded operands of state updates."""
    readers: dict[Value, list[Op]] = {}
    for op in function.ops:
        for value in op.values:
            readers.setdefault(value, []).append(op)
    bounded: set[tuple[Op, Value]] = set()
    for op in function.ops:
        if op.kind == "state_update":
            rule = functions[op.attrs["rule"].name]
            states, count = state_axes(rule)
            domain = rule.attrs.get("domain", {})
            names = [v.name for v in rule.inputs[states:]]
            for name, value in zip(names, op.values[:count], strict=True):
                if domain.get(name, "unit") != "unit":
                    bounded.add((op, value))
    widened: set[Value] = set()
    for op in reversed(function.ops):
        if lookup(op.kind).family != "elementwise":
            continue
        (result,) = op.results
        uses = readers.get(result, [])
        inside = all((r, result) in bounded or set(r.results) & widened for r in uses)
        if uses and inside and result not in function.outputs:
            widened.add(result)
    return widened
