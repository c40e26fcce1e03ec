"""wgmma compared with NumPy:

operands from shared memory and registers, both majors of b, every swizzle, several shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.runtime.schedule import COPIES, ORDERS, Schedule
from hopper_kernels import PRODUCTS, ProductCase


def product(run: Any, case: ProductCase, accumulate: bool = True, **how: Any) -> None:
    a, b, d = case.inputs()
    want = case.expected(a, b, d, accumulate)
    maps = case.maps(a, b)
    run(case.source, "product", *maps, a, d, int(accumulate), block=(128, 1, 1), shared=case.shared_bytes, **how)
    np.testing.assert_array_equal(d, want)


@pytest.mark.rotated(4)
@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_operand_layouts(run: Any, case: ProductCase) -> None:
    product(run, case)
    product(run, case, accumulate=False)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("order", ORDERS)
def test_every_thread_order(run: Any, order: Any, copies: Any) -> None:
    for number, case in enumerate(PRODUCTS[::9]):
        product(run, case, schedule=Schedule(order, copies, seed=number))


@pytest.mark.parametrize("sanitize", ["address", "thread"])
def test_products_are_clean_under_sanitizers(run: Any, sanitize: str) -> None:
    for case in PRODUCTS[4:48:11]:
        product(run, case, sanitize=sanitize, schedule=Schedule("random", "random", seed=1))
