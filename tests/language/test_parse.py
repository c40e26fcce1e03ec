"""Masks and scores from text: nothing is evaluated, and errors show the column."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen as fg
from flashgen.errors import SpecError
from flashgen.language import masks, scores


def test_expressions():
    assert fg.parse_mask("causal() & sliding_window(1024)") == fg.causal() & fg.sliding_window(1024)
    assert fg.parse_mask(" ~document('ids') ") == ~fg.document("ids")
    assert fg.parse_mask("(full() | causal()) ^ causal(align='top_left')") == (fg.full() | fg.causal()) ^ fg.causal(
        "top_left"
    )
    assert fg.parse_mask("prefix_lm(Scalar('p'))").captures == fg.prefix_lm(fg.Scalar("p")).captures
    assert fg.parse_mask("sliding_window(left=+4, right=2)") == fg.sliding_window(4, 2)
    assert fg.parse_score("softcap(30)(alibi(8))") == fg.softcap(30)(fg.alibi(8))
    assert fg.parse_score("softcap(50.0)(softcap(30)(relative_bias(Tensor('t', 'bf16', ndim=2), 64)))").captures
    assert fg.parse_score("alibi(slopes='s')") == fg.alibi("s")


@pytest.mark.parametrize(("module", "parse"), [(masks, fg.parse_mask), (scores, fg.parse_score)])
def test_every_named_mask_and_score_has_an_example(module, parse):
    assert sorted(example.partition("(")[0] for example in module.EXAMPLES) == module.__all__
    assert [parse(example).name for example in module.EXAMPLES] == list(module.EXAMPLES)


@pytest.mark.parametrize(("module", "kind"), [(masks, fg.Mask), (scores, fg.Score)])
def test_every_function_that_creates_one_is_listed(module, kind):
    found = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    returns = {name: vars(module)[name].__annotations__["return"] for name in found if not name.startswith("_")}
    assert sorted(name for name, made in returns.items() if made == kind.__name__) == module.__all__


@pytest.mark.parametrize(("parse", "text", "column", "message"), [
    (fg.parse_mask, "causal() & causl()", 12, "did you mean causal.*known: full"),
    (fg.parse_mask, "causal", 1, r"causal\(...\)"),
    (fg.parse_mask, "causal() and full()", 1, "not and, or, not"), (fg.parse_mask, "not full()", 1, "& | ^ ~"),
    (fg.parse_mask, "full() + causal()", 1, "& | ^ ~"), (fg.parse_mask, "full() & softcap(3)", 10, "score=.*--score"),
    (fg.parse_score, "causal()", 1, "mask=.*SPEC"), (fg.parse_score, "softcap(3) & alibi(4)", 1, "by calling"),
    (fg.parse_score, "softcap(3)(alibi(4), 2)", 1, "one score"), (fg.parse_mask, "causal() & (", 12, "never closed"),
    (fg.parse_mask, "sliding_window(1 + 2)", 16, "argument"), (fg.parse_mask, "sliding_window(x)", 16, "argument"),
    (fg.parse_mask, "full() | sliding_window(-3)", 10, "left=-3"), (fg.parse_mask, "sliding_window()", 1, "missing"),
    (fg.parse_mask, "causal(foo=3)", 1, "unexpected keyword"), (fg.parse_mask, "causal(**{})", 1, "not allowed"),
    (fg.parse_mask, "causal(*x)", 8, "argument"),
    (fg.parse_mask, "__import__('os').system('true')", 1, "expected a mask"),
    (fg.parse_mask, "(lambda: 0)()", 1, "expected a mask"), (fg.parse_mask, "full().name", 1, "expected a mask"),
    (fg.parse_mask, "document('q')", 1, "capture name"), (fg.parse_mask, "document(Tensor('i', 'int3'))", 10, "dtype"),
    (fg.parse_mask, "[full()]", 1, "expected a mask"), (fg.parse_mask, "document(f'{1}')", 10, "argument"),
    (fg.parse_mask, "sliding_window(-'a')", 16, "argument"), (fg.parse_mask, "sliding_window(b'a')", 16, "argument"),
    (fg.parse_mask, "x := full()", 3, "invalid syntax"), (fg.parse_mask, "full() if full() else full()", 1, "& | ^ ~"),
    (fg.parse_mask, "full() 5", 8, "."), (fg.parse_mask, "causal()()", 1, "expected a mask"),
])  # fmt: skip
def test_errors_show_the_column(parse, text, column, message):
    with pytest.raises(SpecError, match=message) as caught:
        parse(text)
    lines = str(caught.value).splitlines()
    assert f"column {column}:" in lines[0]
    assert lines[1].strip() == text.strip()
    assert lines[2].index("^") - 4 == column - 1


@pytest.mark.parametrize("text", ["", "   ", None, 3, "full()\n", "full()\x00", "é()", "x" * 3000,
"~" * 1900 + "full()",
                                  "(" * 900 + "full()" + ")" * 900, "&".join(["full()"] * 280)])  # fmt: skip
def test_invalid_texts(text):
    if text == "full()\n":
        assert fg.parse_mask(text.strip()) == fg.full()
    with pytest.raises(SpecError):
        fg.parse_mask(text)


@given(st.text(alphabet="causalfdocument()&|^~'1, =", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_is_parsed_or_refused(text):
    try:
        mask = fg.parse_mask(text)
    except SpecError:
        return
    assert fg.parse_mask(mask.name) == mask
