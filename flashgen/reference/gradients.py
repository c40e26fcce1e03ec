"""Gradients of attention: checks the gradients of the outputs and sums the gradients of the inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flashgen.errors import ArgumentError
from flashgen.reference.inputs import Array, Problem, floats, heads_first


class Gradients(NamedTuple):
    """Gradients in float64: dq, dk and dv in the spec's layout, and one for each capture declared with grad=True.

    Attributes:
        dq: the gradient of q.
        dk: the gradient of k.
        dv: the gradient of v; None if V is a part of K.
        captures: the gradients of captures, by name.
    """

    dq: Array
    dk: Array
    dv: Array | None
    captures: dict[str, Array]


class Cotangents(NamedTuple):
    """Gradients of the outputs: d_out (batch, heads_q, len_q, value_dim), d_lse (batch, heads_q, len_q)."""

    d_out: Array
    d_lse: Array


def prepare_cotangents(problem: Problem, d_out: Any, d_lse: Any = None) -> Cotangents:
    """Checks the gradients of the outputs against the problem. A d_lse of None is 0. Raises ArgumentError."""
    rows = (problem.batch, problem.heads, problem.len_q)
    lse = np.zeros(rows) if d_lse is None else row_values("d_lse", d_lse, rows)
    return Cotangents(output_like(problem, "d_out", d_out), lse)


def output_like(problem: Problem, name: str, given: Any) -> Array:
    """Returns an argument that has O's shape and layout, with heads before lengths. Raises ArgumentError."""
    array = heads_first(problem.spec, name, given)
    expected = (*problem.q.shape[:3], problem.spec.value_dim)
    if array.shape != expected:
        shown = problem.in_layout(np.empty(expected)).shape
        raise ArgumentError(f"{name} has shape {np.shape(given)}; the output it belongs to has {shown}, give that")
    return array


def row_values(name: str, given: Any, rows: tuple[int, int, int]) -> Array:
    """Returns an argument with one number per row, (batch, heads_q, len_q) in either layout. Raises ArgumentError."""
    array = floats(name, given, "float32")
    if array.shape != rows:
        raise ArgumentError(f"{name} has shape {array.shape}; give (batch, heads_q, len_q) = {rows}, as the LSE has")
    return array


class GradientSums:
    """Accumulators of the gradients of one problem. dk and dv are kept per query head; `gradients` sums each group."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        keys = (problem.batch, problem.heads, problem.len_k)
        self.dq = np.zeros_like(problem.q)
        self.dk = np.zeros((*keys, problem.spec.head_dim))
        self.dv = np.zeros((*keys, problem.spec.value_dim))
        self.captures = {
            capture.name: np.zeros(problem.captures[capture.name].shape)
            for capture in problem.spec.captures
            if capture.grad
        }

    def gradients(self) -> Gradients:
        """Returns the gradients in the layout of the spec, with dk and dv summed over each group of query heads."""
        layout, dk, dv = self._problem.in_layout, self._over_group(self.dk), self._over_group(self.dv)
        if self._problem.spec.shared_kv:
            dk[..., : dv.shape[-1]] += dv
            return Gradients(layout(self.dq), layout(dk), None, self.captures)
        return Gradients(layout(self.dq), layout(dk), layout(dv), self.captures)

    def _over_group(self, per_head: Array) -> Array:
        batch, heads_kv = self._problem.k.shape[:2]
        group = self._problem.heads // heads_kv if heads_kv else 1
        return per_head.reshape(batch, heads_kv, group, *per_head.shape[2:]).sum(axis=2)
