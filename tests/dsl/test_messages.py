"""Golden messages: every one names what disagrees, points at the user's line, says what is next."""

from __future__ import annotations

from pathlib import Path

from tests.dsl.messages import check_messages, spec_of

TRAPS = {
    "a line with other letters": 'é, w = "µ", x if x else -x\nreturn w',
    "if x": "if x:\n    x = -x\nreturn x",
    "while x > 0": "while x > 0:\n    x = x - 1\nreturn x",
    "x and y": "return x and x * 2",
    "not x": "return not x",
    "max(x, 0)": "return max(x, 0)",
    "float(x)": "return x * float(x)",
    "int(x)": "return x * int(x)",
    "math.exp(x)": "return math.exp(x)",
    "range(x)": "for i in range(x):\n    x = x + i\nreturn x",
    "len(x)": "return x * len(x)",
    "np.asarray(x)": "return np.asarray(x) + 1",
    "np.array([x, x])": "return np.array([x, x])",
    "for row in x": "for row in x:\n    x = x + row\nreturn x",
    "a, b = x": "a, b = x\nreturn a + b",
    "x[0] = 1": "x[0] = 1.0\nreturn x",
    "x[0]": "return x[0]",
    "x[:, 1:]": "return x[:, 1:]",
    "x += 1": "x += 1\nreturn x",
    "np.exp(x, out=x)": "return np.exp(x, out=x)",
    "np.add.reduce(x)": "return np.add.reduce(x)",
    "np.cumsum(x)": "return np.cumsum(x, axis=1)",
    "np.sign(x)": "return np.sign(x)",
    "np.diag(matrix)": "return np.diag(x)",
    "np.sum(x, dtype=float)": "return np.sum(x, axis=1, dtype=float)",
    "x[tokens]": "return x[tokens]",
    "x[:, :, :, :]": "return x[:, :, :, :]",
    "i & 1": "i = ar.positions(tokens)\nreturn x * ar.expand_dims(i & 1, 2)",
    "x & x": "return ar.where((x > 0) | x, x, -x)",
    "~tokens": "return ar.embedding(~tokens, c.vocab, 8, name='again')",
    "np.split(x, 2)": "return np.split(x, 2)[0]",
    "x @ x": "return x @ x",
    "x @ array": "return x @ np.ones((8, 8))",
    "x + array": "return x + np.ones(8)",
    "x + 'a'": "return x + 'a'",
}

SHAPES = {
    "linear, tied weight": 'w = ar.weight("w", [c.width, 3])\nreturn ar.linear(x, w)',
    "add": 'return x + ar.linear(x, 5, name="up")',
    "layer norm over a weight of another size": (
        'w = ar.weight("w", [c.width + 1])\nreturn ar.rms_norm(x, name="") * w'
    ),
    "heads": "q, k, v = ar.heads(x, 3, c.heads)\nreturn q",
    "attention, sizes": (
        'q = ar.heads(ar.linear(x, 8, name="q"), 1, 2)\n'
        'k = ar.heads(ar.linear(x, 6, name="k"), 1, 2)\n'
        "return ar.merge(ar.attention(q, k, k))"
    ),
    "attention, heads": (
        'q = ar.heads(ar.linear(x, 8, name="q"), 1, 2)\n'
        'k = ar.heads(ar.linear(x, 12, name="k"), 1, 3)\n'
        "return ar.merge(ar.attention(q, k, k))"
    ),
    "logits": 'return ar.logits(x, ar.weight("head", [c.vocab, 2 * c.width]))',
    "embedding of floats": 'return ar.embedding(x, c.vocab, c.width, name="again")',
    "split": "a, b = ar.split(x, [3, 3])\nreturn a + b",
    "concat": 'return ar.concat([x, ar.linear(x, 5, name="up")], axis=1)',
    "reshape": "return x.reshape(3, 5)",
    "dtypes": 'w = ar.weight("w", [8, 8], dtype="float32")\nreturn ar.linear(x, w)',
    "rotary": "q = ar.heads(x, 1, 8)\nreturn ar.rotary(q, ar.positions(tokens))",
    "where": "return ar.where(x, x, 0.0)",
    "arguments": "return ar.attention(x, x, x)",
    "sum over an axis that is not there": "return x + x.sum(axis=5, keepdims=True)",
    "mean over an axis before the first": "return x + np.mean(x, axis=-4, keepdims=True)",
    "sum over one axis twice": "return x + np.sum(x, axis=(2, -1), keepdims=True)",
    "stack": "return np.stack([x, x], axis=4)",
    "new axis": "return ar.expand_dims(x, 5)",
    "transpose": "return np.transpose(x, (0, 1, 3))",
    "reshape to a tuple": "return x.reshape((3, 5))",
    "cast to bfloat16": 'return ar.cast(x, "bfloat16")',
    "cast to no dtype": 'return ar.cast(x, "int")',
}

QKV = 'q, k, v = ar.heads(ar.linear(x, 24, name="qkv"), 3, 2)\n'
CAP = "@ar.pointwise\ndef cap(z, limit):\n    return limit * np.tanh(z / limit)\n\n\n"

FUNCTIONS = {
    "a mask that gives integers": spec_of(
        f"{QKV}return ar.attention(q, k, v, mask=lambda i, j: i - j)"
    ),
    "a mask of bits": spec_of(f"{QKV}return ar.attention(q, k, v, mask=lambda i, j: i & 1 == j)"),
    "a mask of three": spec_of(f"{QKV}return ar.attention(q, k, v, mask=lambda i, j, h: i > j)"),
    "a score that gives bools": spec_of(
        f"{QKV}return ar.attention(q, k, v, score=lambda s, i, j, h: s > 0)"
    ),
    "a score of two": CAP + spec_of(f"{QKV}return ar.attention(q, k, v, score=cap)"),
    "pointwise of one": CAP + spec_of("return cap(x)"),
    "a weight in a pointwise function": (
        '@ar.pointwise\ndef scale(z):\n    return z * ar.weight("scale", [1])\n\n\n'
        + spec_of("return scale(x)")
    ),
    "two attentions of one name": spec_of(
        f'{QKV}q = ar.attention(q, k, v, name="attn")\nreturn ar.attention(q, k, v, name="attn")'
    ),
    "an attention and a rule of one name": (
        '@ar.recurrence("q:K k:K v:V -> o:V")\ndef rule(S, q, k, v):\n'
        "    S = S + np.outer(k, v)\n    return S, q @ S\n\n\n"
        + spec_of(f'{QKV}q = rule(q, k, v, name="attn")\n'
                  'return ar.attention(q, k, v, name="attn")')
    ),
}  # fmt: skip

WEIGHTS = {
    "unnamed": "return ar.linear(x, 8)",
    "empty name": 'return ar.weight("", [8]) * x',
    "duplicate": 'x = ar.linear(x, 8, name="up")\nreturn ar.linear(x, 8, name="up")',
    "unused": 'ar.weight("spare", [8])\nreturn x',
    "unused through a dead op": 'y = ar.linear(x, 8, name="spare")\nreturn x',
    "pinned to another dtype": 'return x * ar.weight("w", [8], dtype="bfloat16")',
    "init of another type": 'return x * ar.weight("w", [8], init=0.02)',
    "a size that is no number": 'return x * ar.weight("w", [x.shape[1]])',
    "unused in one of two calls": (
        "@ar.block\ndef two(x):\n"
        '    return ar.linear(x, 8, name="a"), ar.linear(x, 8, name="b")\n\n'
        'x, y = two(x, name="h.0")\nx, _ = two(x + y, name="h.1")\nreturn x'
    ),
    "given to a block that does not use it": (
        "@ar.block\ndef first(x, w):\n    return x\n\n"
        'return first(x, ar.weight("spare", [8]), name="h")'
    ),
    "a bias that is a number": 'return ar.linear(x, 8, name="up", bias=0.5)',
    "a name with a dash": 'return ar.linear(x, 8, name="attn-proj")',
    "a name that is a keyword": 'return ar.linear(x, 8, name="h.class")',
    "a name with a space": 'return ar.weight("a b", [8]) * x',
    "a name that is a number": 'return ar.weight("p.0", [8]) * x',
    "a number with a zero first": 'return ar.linear(x, 8, name="h.01")',
    "a name of other letters": 'return ar.weight("\u00b5", [8]) * x',
    "tap without a name": 'ar.tap("", x)\nreturn x',
}

BLOCK = """\
@ar.block
def layer(x: "f[B, T, width]", c):
    return ar.linear(x, c.width, name="up")


"""

STRUCTURE = {
    "a scope with a dash": BLOCK + spec_of('return layer(x, c, name="h-0")'),
    "a symbol that is taken": ('@ar.block\ndef broken(x: "f[B, T, J]"):\n    return ar.exp(x)\n'),
    "scope used twice": BLOCK
    + spec_of('x = layer(x, c, name="h.0")\nreturn layer(x, c, name="h.0")'),
    "input that its annotation refuses": BLOCK
    + spec_of('y = ar.linear(x, 5, name="y")\nreturn layer(y, c, name="h")'),
    "value of another block": (
        "kept = []\n\n\n"
        "@ar.block\ndef layer(x, y):\n    kept.append(x)\n    return x + kept[0]\n\n\n"
        + spec_of('x = layer(x, x, name="h.0")\nreturn layer(x, x, name="h.1")')
    ),
    "value of the caller": (
        spec_of(
            "@ar.block\ndef inner(y):\n    return y + x\n\nreturn inner(ar.exp(x), name='inner')"
        )
    ),
    "returns a number": spec_of("return 1.0"),
    "returns nothing": spec_of("x + 1"),
    "returns a list of lists": spec_of("return [[x]]"),
    "block returns a number": (
        "@ar.block\ndef layer(x):\n    return 3\n\n\n" + spec_of('return layer(x, name="h")')
    ),
    "called outside of tracing": "broken = ar.gelu_tanh(1.0)",
    "config with a list": (
        "@ar.config\nclass Wrong:\n    sizes: list = [1, 2]\n\n\n" + spec_of("return x")
    ),
    "block without annotations alone": ("@ar.block\ndef broken(x, y, c):\n    return x + y\n"),
    "annotation that is no type": (
        '@ar.block\ndef layer(x: "float[B, T]"):\n    return x\n\n\n'
        + spec_of('return layer(x, name="h")')
    ),
}

UPDATE = "S = S + np.outer(k, v)\n"
BODY = f"{UPDATE}return S, q @ S"


def rule_of(
    body: str, signature: str = "q:K k:K v:V -> o:V", states: str = "S", **domain: str
) -> str:
    """A rule with this body, on the operands q, k and v."""
    given = f'"{signature}", domain={domain}' if domain else f'"{signature}"'
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    return f"@ar.recurrence({given})\ndef broken({states}, q, k, v):\n{lines}"


RULES = {
    "no arrow": rule_of(BODY, "q:K k:K v:V"),
    "no outputs": rule_of(BODY, "S:K,V | q:K k:K v:V ->"),
    "no operands": rule_of(BODY, "-> o:V"),
    "an operand without dims": rule_of(BODY, "q:K k:K v -> o:V"),
    "an operand twice": rule_of(BODY, "q:K k:K k:V -> o:V"),
    "parameters in another order": rule_of(BODY, "k:K q:K v:V -> o:V"),
    "an operand the body lacks": rule_of(BODY, "q:K k:K v:V g:K -> o:V"),
    "no state": rule_of(BODY, "S:K q:K k:K v:V -> o:V"),
    "two states without shapes": rule_of("return S, z, q @ S", states="S, z"),
    "states stated under other names": rule_of(BODY, "A:K,V | q:K k:K v:V -> o:V"),
    "a state of unknown size": rule_of(BODY, "S:K,M | q:K k:K v:V -> o:V"),
    "a domain not understood": rule_of(BODY, k="positive"),
    "a domain of nothing": rule_of(BODY, g="<= 0"),
    "too few results": rule_of("return q @ S"),
    "an output of another shape": rule_of(BODY, "q:K k:K v:V -> o:K"),
    "a body whose sizes disagree": rule_of(f"{UPDATE}S = S + k\nreturn S, q @ S"),
    "a state that is forgotten": rule_of("return 0.0, q @ S"),
    "a dim that is taken": rule_of(BODY, "q:H k:H v:V -> o:V"),
    "a weight in a rule": rule_of(f'k = k * ar.weight("w", [8])\n{BODY}'),
    "if in a rule": rule_of(f"if np.sum(k) > 0:\n    S = -S\n{BODY}"),
    "in place in a rule": rule_of("S += np.outer(k, v)\nreturn S, q @ S"),
    "a length in a rule": rule_of(f"q = q / len(k)\n{BODY}"),
    "a dim as a number": rule_of(f"q = q / int(K)\n{BODY}"),
    "np.linalg in a rule": rule_of(f"k = k / np.linalg.norm(k)\n{BODY}"),
}


def test_traps(tmp_path: Path) -> None:
    check_messages("dsl/traps", tmp_path, {k: spec_of(v) for k, v in TRAPS.items()})


def test_shapes(tmp_path: Path) -> None:
    check_messages("dsl/shapes", tmp_path, {k: spec_of(v) for k, v in SHAPES.items()})


def test_weights(tmp_path: Path) -> None:
    check_messages("dsl/weights", tmp_path, {k: spec_of(v) for k, v in WEIGHTS.items()})


def test_structure(tmp_path: Path) -> None:
    check_messages("dsl/structure", tmp_path, STRUCTURE)


def test_functions(tmp_path: Path) -> None:
    check_messages("dsl/functions", tmp_path, FUNCTIONS)


def test_rules(tmp_path: Path) -> None:
    check_messages("dsl/rules", tmp_path, RULES)
