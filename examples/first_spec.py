"""The first spec of the README: a window and four global tokens, ALiBi with slopes passed at the call, dropout.

flashgen show examples/first_spec.py:spec
flashgen verify examples/first_spec.py:spec
python examples/first_spec.py
"""

import numpy as np

import flashgen as fg


def near_or_global(b, h, q, k):  # any function of indices, as in FlexAttention
    return (abs(q - k) <= 128) | (k < 4)


slopes = fg.Tensor("slopes", dtype="float32", ndim=1, grad=True)  # an array given at the call
spec = fg.AttentionSpec(
    head_dim=64,
    dtype="float16",
    mask=fg.causal() & near_or_global,
    score=lambda s, b, h, q, k: s + slopes[h] * (k - q),
    dropout=0.1,
)


def main() -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, 8, 1000, 64)).astype("float16") for _ in range(3))
    slope_array = (2.0 ** -np.arange(1, 9)).astype("float32")

    attention = fg.compile(spec, emulate=True)  # on this CPU; without emulate, on this GPU
    out, lse = attention(q, k, v, slopes=slope_array, seed=7, return_lse=True)
    expected, expected_lse = fg.reference.attention(spec, q, k, v, slopes=slope_array, seed=7, return_lse=True)

    d_out = random.standard_normal(out.shape).astype("float16")
    dq, dk, dv, d_slopes = attention.backward(d_out, q, k, v, out, lse, slopes=slope_array, seed=7)
    gradients = {"dq": dq, "dk": dk, "dv": dv, "d_slopes": d_slopes}

    low = fg.reference.low_precision(spec, q, k, v, slopes=slope_array, seed=7)  # rounded to float16 at each step
    verdicts = {"out": fg.reference.judge(out, expected, low, lse, expected_lse)}
    verdicts |= fg.verify.judged_gradients(spec, q, k, v, d_out, gradients, slopes=slope_array, seed=7)

    print(attention)
    for name, verdict in verdicts.items():
        print(f"{name:8} {verdict}")
    print(f"{attention.tiles(1000).share:.1%} of the tiles visited; {attention.plan}")
    if not all(verdict.ok for verdict in verdicts.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    try:
        main()
    except fg.errors.FlashgenError as error:  # for example, there is no C++ compiler
        raise SystemExit(f"error: {error}") from None
