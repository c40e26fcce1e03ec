"""Proofs about masks, and derivatives of scores.

closed_forms/        formulas of a tile's first and last index: key ranges, query ranges, and what is uniform in a tile
intervals/           interval arithmetic: what is certain of any expression over boxes of indices
tile_classes         the class of every tile: tile_map
tile_elements        which scores of one tile a mask keeps: tile_elements
captured_extents     the batch and the number of heads that the captured arrays of a mask are made for
integer_bounds       bounds of integers over all calls: whether int32 holds them, and whether they may wrap
drawing/             a tile map, or one tile, as text and as SVG
derivatives          derivatives of score functions: derivative, gathers
derivative_algebra   simplification of the nodes that derivatives are built of
expression_text      expressions as infix text
"""
