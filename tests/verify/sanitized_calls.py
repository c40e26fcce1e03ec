"""The program that test_compute_sanitizer.py runs: the forward of each variant at one shape on this GPU."""

from __future__ import annotations

from flashgen.verify import named_cases, verify

if __name__ == "__main__":
    results = list(verify(named_cases(1), passes=("forward",)))
    wrong = [f"{result.case}: {result.problem or result.verdict}" for result in results if not result.ok]
    assert not wrong, wrong
    print(f"{len(results)} calls agree")
