"""What archir says of rules that are wrong; the rest stands in tests/dsl/test_messages.py."""

from __future__ import annotations

from pathlib import Path

from tests.dsl.messages import check_messages, spec_of
from tests.dsl.test_messages import BODY, UPDATE, rule_of

STRENGTH = (
    '@ar.recurrence("q:K k:K v:V beta: -> o:V")\ndef broken(S, q, k, v, beta):\n'
    "    S = S + float(beta) * np.outer(k, v)\n    return S, q @ S\n"
)
DELTA = """\
@ar.recurrence("q:K k:K v:V g: beta: -> o:V", domain={"g": "<= 0", "beta": "0..1", "k": "unit"})
def delta(S, q, k, v, g, beta):
    S = np.exp(g) * S
    S = S + np.outer(k, beta * (v - k @ S))
    return S, q @ S


"""
STATED = "S:K,V | q:K k:K v:V -> o:V"


def given_to_delta(gate: str, strength: str, key: str = "ar.l2_norm(k)") -> str:
    """A spec that gives a rule what its domain denies."""
    return DELTA + spec_of(
        'q, k, v = ar.heads(ar.linear(x, 24, name="qkv"), 3, c.heads)\n'
        'z = ar.linear(x, c.heads, name="z")\n'
        f"g = {gate}\nbeta = {strength}\nk = {key}\n"
        "return ar.merge(delta(q, k, v, g, beta))"
    )


WRONG = {
    "an outer product of the wrong sides": rule_of(
        "S = S + np.outer(v, k)\nreturn S, q @ S", STATED
    ),
    "an outer product of the wrong sides, its state unstated": rule_of(
        "S = S + np.outer(v, k)\nreturn S, q @ S"
    ),
    "a vector that scales the wrong side": rule_of(f"S = np.exp(k) * S\n{BODY}", STATED),
    "a read of the wrong side": rule_of(f"{UPDATE}return S, S @ q", STATED),
    "a domain that holds no number": rule_of(BODY, k="1..0"),
    "a strength above its domain": given_to_delta("-ar.softplus(z)", "2 * ar.sigmoid(z)"),
    "a strength below its domain": given_to_delta("-ar.softplus(z)", "ar.tanh(z)"),
    "a gate whose sign is forgotten": given_to_delta("ar.softplus(z)", "ar.sigmoid(z)"),
    "a gate that IR text calls otherwise": given_to_delta("ar.softplus(z)", "z")
    .replace(" g: ", " f: ")
    .replace('"g"', '"f"')
    .replace("v, g, beta):", "v, f, beta):")
    .replace("np.exp(g)", "np.exp(f)"),
    "a key longer than a unit": given_to_delta("-z * z", "z", "2 * ar.l2_norm(k)"),
    "an undeclared name": rule_of(f"S = gamma * S\n{BODY}"),
    "a misspelt name": rule_of(f"q = q * vv\n{BODY}"),
    "a forgotten import": rule_of(f"q = numpy.exp(q)\n{BODY}"),
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
