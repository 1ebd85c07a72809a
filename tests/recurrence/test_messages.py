"""What archir says of rules that are wrong; the rest stands in tests/dsl/test_messages.py."""

from __future__ import annotations

from pathlib import Path

from tests.dsl.messages import check_messages
from tests.dsl.test_messages import BODY, UPDATE, rule_of

STRENGTH = (
    '@ar.recurrence("q:K k:K v:V beta: -> o:V")\ndef broken(S, q, k, v, beta):\n'
    "    S = S + float(beta) * np.outer(k, v)\n    return S, q @ S\n"
)
STATED = "S:K,V | q:K k:K v:V -> o:V"

WRONG = {
    "an outer product of the wrong sides": rule_of(
        "S = S + np.outer(v, k)\nreturn S, q @ S", STATED
    ),
    "an outer product of the wrong sides, its state unstated": rule_of(
        "S = S + np.outer(v, k)\nreturn S, q @ S"
    ),
    "a read of the wrong side": rule_of(f"{UPDATE}return S, S @ q", STATED),
    "an undeclared name": rule_of(f"S = gamma * S\n{BODY}"),
    "an undeclared dim": rule_of(f"q = q * D**-0.5\n{BODY}"),
    "outputs before states": rule_of(f"{UPDATE}return q @ S, S"),
    "an output too many": rule_of(f"{UPDATE}return S, q @ S, k @ S"),
    "an output that is a number": rule_of(f"{UPDATE}return S, np.sum(q @ S)"),
    "a body without return": rule_of(UPDATE.strip()),
    "a Python if": rule_of(f"if k @ k > 1:\n    k = k / 2\n{BODY}"),
    "float of an operand": STRENGTH,
    "+= on the state": rule_of("S += np.outer(k, v)\nreturn S, q @ S", STATED),
    "*= on an operand": rule_of(f"q *= K**-0.5\n{BODY}"),
    "out= on the state": rule_of(f"np.multiply(S, 0.5, out=S)\n{BODY}"),
    "assignment to rows of the state": rule_of(f"S[:] = 0.5 * S\n{BODY}", STATED),
}


def test_wrong_rules(tmp_path: Path) -> None:
    check_messages("recurrence/wrong", tmp_path, WRONG)
