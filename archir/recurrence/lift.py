"""`batch`: a rule on one head and one token, lifted to tensors with leading axes.

  def kda(S: F[K, V], k: F[K], beta: F)          einsum(k, S, "i,ij->j")
→ def kda_step(S: F[R, H, K, V], k: F[R, H, K], beta: F[R, H])      einsum("YZi,YZij->YZj")
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from archir import types
from archir.diagnostics import PassError
from archir.dims import Poly
from archir.ir import Function, Op, Operand, Value
from archir.ops import lookup
from archir.passes.rewrite import Rewriter
from archir.types import Tensor

_LETTERS = "YZX" + string.ascii_uppercase + string.ascii_lowercase


def batch(
    rule: Function, lead: tuple[int | Poly, ...], binding: Mapping[str, int | Poly], name: str
) -> Function:
    """The body that runs `rule` at every index of the leading axes; dims are bound by `binding`."""
    lift = _Lift(rule, lead, binding)
    for value in rule.inputs:
        type_ = types.substitute(value.type, binding)
        assert isinstance(type_, Tensor)
        lifted = replace(value, type=Tensor(type_.dtype, (*lead, *type_.shape)))
        lift.inputs.append(lifted)
        lift.values[value] = lifted
    for op in rule.ops:
        lift.op(op)
    outputs = tuple(lift.everywhere(v) for v in rule.outputs)
    ops = tuple(lift.ops)  # with those that brought outputs to the leading axes
    return lift.finish(name=name, role="body", attrs={}, outputs=outputs, ops=ops)


class _Lift(Rewriter):
    def __init__(
        self, old: Function, lead: tuple[int | Poly, ...], binding: Mapping[str, int | Poly]
    ) -> None:
        super().__init__(old, {})
        self.lead, self.binding = lead, binding
        self.lifted: set[Value] = set(old.inputs)

    def op(self, op: Op) -> None:
        if any(x in self.lifted for x in op.values):
            self.lifted |= set(op.results)
            if lookup(op.kind).family == "elementwise":
                self.copy(op, self._aligned(op))
            elif op.kind == "concat":
                operands = tuple(self.everywhere(x) for x in op.values)
                self.copy(op, operands, self._shifted(op))
            else:
                self.copy(op, attrs=self._shifted(op))
        else:
            attrs = {k: self._bound(v) for k, v in op.attrs.items()}
            self.copy(op, attrs=attrs)

    def everywhere(self, old: Value) -> Value:
        """The new value of an old one, with the leading axes also where it depends on no input."""
        new = self.value(old)
        if old in self.lifted:
            return new
        assert isinstance(new.type, Tensor)
        return self.emit("broadcast_to", new, shape=(*self.lead, *new.type.shape), hint=new.name)

    def _bound(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._bound(v) for v in value)
        return types.dims.substitute(value, self.binding) if isinstance(value, Poly) else value

    def _aligned(self, op: Op) -> tuple[Operand, ...]:
        """Inner axes aligned at the end: a lifted vector beside a lifted matrix gets an axis."""
        ranks = [x.type.rank for x in op.values if isinstance(x.type, Tensor)]
        top = max(ranks)

        def align(x: Operand) -> Operand:
            new = self[x]
            if not isinstance(x, Value) or x not in self.lifted:
                return new
            assert isinstance(x.type, Tensor)
            missing = top - x.type.rank
            if not missing:
                return new
            at = len(self.lead)
            return self.emit("expand_dims", new, axes=tuple(range(at, at + missing)), loc=op.loc)

        return tuple(align(x) for x in op.operands)

    def _shifted(self, op: Op) -> dict[str, Any]:
        attrs = {k: self._bound(v) for k, v in op.attrs.items()}
        shift = len(self.lead)
        match op.kind:
            case "einsum":
                free = [x for x in _LETTERS if x not in attrs["equation"]]
                letters = "".join(free[:shift])
                left, _, right = attrs["equation"].partition("->")
                terms = zip(left.split(","), op.values, strict=True)
                left = ",".join(letters + t if v in self.lifted else t for t, v in terms)
                attrs["equation"] = f"{left}->{letters}{right}"
            case "expand_dims" | "reduce_sum" | "reduce_mean" | "reduce_max":
                attrs["axes"] = tuple(a + shift for a in attrs["axes"])
            case "transpose":
                attrs["axes"] = (*range(shift), *(a + shift for a in attrs["axes"]))
            case "reshape" | "broadcast_to":
                attrs["shape"] = (*self.lead, *attrs["shape"])
            case "concat" | "split" | "repeat" | "cumprod":
                axis = attrs["axis"]
                attrs["axis"] = axis + shift if axis >= 0 else axis
            case "cast" | "heads" | "merge" | "l2_norm" | "rms_norm" | "substitute":
                pass  # they look at the last axes only
            case _:
                raise PassError(
                    f"rule {self.old.name}: {op.kind} of one head and one token is not known for "
                    f"{shift} leading axes",
                    code="lift-op",
                    loc=op.loc,
                    next="write it in elementwise ops, np.einsum, np.sum, np.transpose, np.where",
                )
        return attrs
