"""`flashgen bench biases`: its cases, rows and table. Times need a GPU."""

import pytest

from flashgen.bench.biases import BIAS_CASES, BIAS_PEERS, BiasRow, bias_rows, bias_spec, mask_spec
from flashgen.bench.summary import biases
from flashgen.cli import bench as commands
from flashgen.cli.bench_tables import biases as columns
from flashgen.codegen.expressions.row_elements import paired_elements, paired_mask_elements


def test_rows_compare_with_the_best_peer() -> None:
    row = BiasRow("triangle 256", "sm_90a", "forward", {"flashgen": 1.0, "cuDNN": 2.0, "Flex": 1.5})
    assert row.best_ratio == 1.5 and row.to_dict()["best_ratio"] == 1.5
    assert BiasRow("triangle 256", "sm_90a", "forward", {"flashgen": 1.0}).best_ratio is None
    cells = {name: text(row) for name, text in columns(["flashgen", *BIAS_PEERS]).items()}
    assert cells["flashgen ms"] == "1.000" and cells["EFFICIENT ms"] == "-" and cells["times the best peer"] == "1.50"
    (line,) = biases([row])
    assert "1 of 1 biases" in line
    (line,) = biases([BiasRow("mask 2 x 2048", "sm_90a", "forward", {"flashgen": 1.0, "cuDNN": 1.1})])
    assert "0 of 1 masks" in line


def test_arrays_of_cases_are_read_in_pairs() -> None:
    assert commands.BIAS_PEERS == BIAS_PEERS
    for case in BIAS_CASES:
        spec = (mask_spec if case.masks else bias_spec)(case.head_dim, "bfloat16")
        found = paired_mask_elements(spec) if case.masks else paired_elements(spec)
        assert [capture.grad for capture in spec.captures] == [not case.masks] and len(found) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("timed", ["forward", "backward"])
def test_peers_are_measured(timed: str) -> None:
    pytest.importorskip("torch")
    (row,) = bias_rows(BIAS_CASES[3:4], timed=timed)  # type: ignore[arg-type]
    assert row.milliseconds["flashgen"] > 0 and "Flex" in row.milliseconds
