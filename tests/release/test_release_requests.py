"""Release requests: valid contents, and errors about invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashgen.codegen.append_kernel import render_append
from flashgen.codegen.merge_kernel import render_merge
from flashgen.codegen.targets import TARGETS
from flashgen.errors import SpecError, UnsupportedError
from flashgen.language import AttentionSpec, Tensor, causal, softcap
from flashgen.release import Request, Step, read_requests


def write(folder: Path, text: str, name: str = "release.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_group_is_the_product_of_its_lists(tmp_path: Path) -> None:
    manifest = write(
        tmp_path,
        """
        [[kernels]]
        mask = ["causal()", ""]
        score = ["", "softcap(30)"]
        head_dim = [64, 128]
        dtype = ["float16", "bfloat16"]
        target = ["sm_80", "sm_90"]
        """,
    )
    requests = read_requests(manifest)
    assert len(set(requests)) == len(requests) == 32
    assert requests[0].spec == AttentionSpec(head_dim=64, mask=causal())
    assert requests[0].target.name == "sm_80"
    assert AttentionSpec(head_dim=128, dtype="bfloat16", score=softcap(30)) in {request.spec for request in requests}


def test_every_argument_of_a_spec(tmp_path: Path) -> None:
    manifest = write(
        tmp_path,
        """
        [[kernels]]
        head_dim = 64
        value_dim = 32
        dtype = "bfloat16"
        scale = 0.5
        layout = "bshd"
        dropout = 0.1
        shared_kv = true
        target = "sm_80"
        """,
    )
    (request,) = read_requests(manifest)
    options: Any = {"scale": 0.5, "layout": "bshd", "dropout": 0.1, "shared_kv": True}
    assert request.spec == AttentionSpec(head_dim=64, value_dim=32, dtype="bfloat16", **options)


def test_json_and_specs_in_json(tmp_path: Path) -> None:
    spec = AttentionSpec(head_dim=64, mask=causal(), score=softcap(30))
    as_text, as_table = spec.to_json(), json.loads(spec.to_json())
    groups = [{"spec": [as_text, as_table], "target": "sm_80"}, {"spec": as_text, "target": ["sm_80", "sm_86"]}]
    requests = read_requests(write(tmp_path, json.dumps({"kernels": groups}), "release.json"))
    assert [(request.spec, request.target.name) for request in requests] == [(spec, "sm_80"), (spec, "sm_86")]


def test_passes_and_kinds_of_backward(tmp_path: Path) -> None:
    groups = [
        {"head_dim": 64, "target": "sm_80", "passes": ["backward", "forward"], "deterministic": [False, True]},
        {"head_dim": 64, "target": "sm_80", "passes": "backward"},
    ]
    requests = read_requests(write(tmp_path, json.dumps({"kernels": groups}), "release.json"))
    found = [(request.passes, request.deterministic) for request in requests]
    both = ("forward", "backward")
    assert found == [(both, False), (both, True), (("backward",), False)]


def test_steps_of_a_server_and_sinks(tmp_path: Path) -> None:
    manifest = write(
        tmp_path,
        """
        [[kernels]]
        step = ["append_kv", "merge_states"]
        dtype = "bfloat16"
        parts = [2, 3]
        target = ["sm_80", "sm_75"]

        [[kernels]]
        head_dim = 64
        page_size = [16, 64]
        sink = ["sinks", ""]
        target = "sm_80"

        [[kernels]]
        head_dim = 64
        sink = "sinks"
        passes = ["forward", "backward"]
        target = "sm_80"
        """,
    )
    requests = read_requests(manifest)
    steps = [each for each in requests if isinstance(each, Step)]
    assert [(each.name, each.target.name) for each in steps] == [
        *(("append_kv", "sm_80"), ("append_kv", "sm_75")),
        *(("merge_states", name) for name in ("sm_80", "sm_80", "sm_75", "sm_75")),
    ]
    assert steps[2].rendered().source == render_merge("bfloat16", 2, "bhsd", TARGETS["sm_80"]).source
    assert steps[0].rendered().source == render_append(TARGETS["sm_80"]).source
    with pytest.raises(UnsupportedError, match="bfloat16"):
        steps[4].rendered()
    specs = [each.spec for each in requests if isinstance(each, Request)]
    sink = Tensor("sinks", "float32", 1)
    assert specs[:4] == [AttentionSpec(64, page_size=size, sink=each) for size in (16, 64) for each in (sink, None)]
    assert specs[4] == AttentionSpec(64, sink=Tensor("sinks", "float32", 1, grad=True))


def test_the_step_that_appends_records(tmp_path: Path) -> None:
    text = """
        [[kernels]]
        step = "append_kv"
        kv_dtype = "fp8_ds_mla"
        target = "sm_90a"
        """
    (step,) = read_requests(write(tmp_path, text))
    assert isinstance(step, Step) and "append_fp8_ds_mla(" in step.rendered().source
    with pytest.raises(SpecError, match="kv_dtype='int8' is not supported: give one of fp8_ds_mla"):
        read_requests(write(tmp_path, text.replace("fp8_ds_mla", "int8")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"must hold one or more groups \[\[kernels\]\]"),
        ("kernels = []", r"must hold one or more groups"),
        ("kernel = 1", r"must hold one or more groups"),
        ("[[kernels]\n", r"cannot be read"),
        ("kernels = [1]", r"group 1 of `kernels`: a group must be a table, got 1"),
        ("[[kernels]]\nhead_dim = 64", r"group 1 .*`target` is missing"),
        ("[[kernels]]\ntarget = 'sm_80'", r"group 1 .*`head_dim` is missing"),
        ("[[kernels]]\nhead_dim = 64\ntarget = 'sm_80'\nheads = 3", r"unknown key 'heads'; the keys are spec, target"),
        ("[[kernels]]\nhead_dim = []\ntarget = 'sm_80'", r"`head_dim` is an empty list"),
        ("[[kernels]]\nhead_dim = 64\ntarget = 'sm_52'", r"target='sm_52' is not supported; choose one of"),
        ("[[kernels]]\nhead_dim = 64\ntarget = 80", r"target=80 is not supported"),
        ("[[kernels]]\nhead_dim = 63\ntarget = 'sm_80'", r"group 1 .*head_dim=63"),
        ("[[kernels]]\nhead_dim = 64\nmask = 'cusal()'\ntarget = 'sm_80'", r"group 1 .*cusal"),
        (
            "[[kernels]]\nhead_dim = 64\npasses = 'sideways'\ntarget = 'sm_80'",
            r"names 'sideways'; choose from",
        ),
        (
            "[[kernels]]\nhead_dim = 64\ndeterministic = true\ntarget = 'sm_80'",
            r"applies to the backward: add it to",
        ),
        (
            "[[kernels]]\nhead_dim = 64\npasses = 'backward'\ndeterministic = 1\ntarget = 'sm_80'",
            r"must be true, false or both, got \[1\]",
        ),
        ("[[kernels]]\nhead_dim = 64\nmask = 0\ntarget = 'sm_80'", r"group 1 .*got 0"),
        ("[[kernels]]\nhead_dim = 64\nmask = '__import__(\"os\")'\ntarget = 'sm_80'", r"group 1 .*__import__"),
        ("[[kernels]]\nspec = '{}'\nhead_dim = 64\ntarget = 'sm_80'", r"remove `head_dim`"),
        ("[[kernels]]\nspec = 'no JSON'\ntarget = 'sm_80'", r"group 1 "),
        ("[[kernels]]\nstep = 'append'\ntarget = 'sm_80'", r"`step` names 'append'; choose from append_kv"),
        (
            "[[kernels]]\nstep = 'append_kv'\nhead_dim = 64\ntarget = 'sm_80'",
            r"`head_dim` belongs to a spec; with `step`",
        ),
        ("[[kernels]]\nstep = 'merge_states'\ntarget = 'sm_80'", r"`dtype` is missing: give the dtype of the outputs"),
        ("[[kernels]]\nstep = 'merge_states'\ndtype = 'int8'\ntarget = 'sm_80'", r"group 1 .*dtype='int8'"),
        (
            "[[kernels]]\nstep = 'merge_states'\ndtype = 'float16'\nparts = 17\ntarget = 'sm_80'",
            r"`parts` is 17; merge_states takes 2 to 16",
        ),
        (
            "[[kernels]]\nstep = 'merge_states'\ndtype = 'float16'\nlayout = 'thd'\ntarget = 'sm_80'",
            r"`layout` is 'thd'; merge_states takes",
        ),
        ("[[kernels]]\nhead_dim = 64\nparts = 2\ntarget = 'sm_80'", r"`parts` applies to merge_states"),
    ],
)
def test_errors_name_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_requests(write(tmp_path, text))


def test_a_missing_manifest(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nothing\.toml cannot be read"):
        read_requests(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"kernels": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        ("a.toml", b"kernels = " + b"[" * 100_000 + b"]" * 100_000, "nested too deep"),
        ("a.json", b'{"kernels": [{"head_dim": NaN, "target": "sm_80"}]}', "head_dim is nan"),
        ("a.toml", b'[[kernels]]\nhead_dim = nan\ntarget = "sm_80"', "group 1 .*head_dim"),
        ("a.toml", b"kernels = '\xff'", "codec can't decode"),
    ],
    ids=["deep JSON", "deep TOML", "NaN in JSON", "NaN in TOML", "not UTF-8"],
)
def test_malicious_requests_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecError, match=message):
        read_requests(tmp_path / name)
