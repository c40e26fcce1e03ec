"""What can be proven of a mask: key and query ranges, tile classes, and pictures of them; derivatives of scores.

affine       canonical affine forms of integer nodes
order        provable comparisons of nodes, and the shortest min and max that they allow
predicate    a predicate as a disjunction of conjunctions of affine comparisons
runs         one run of positions per row, solved from a conjunction
ranges       closed forms over a tile: key_range, query_range
intervals    three-valued evaluation of any node over boxes
tiles        the class of every tile: tile_map
elements     which scores of one tile a mask keeps: tile_elements
draw         a tile map, or one tile, as text, SVG and PNG
picture      a grid of coloured cells as SVG and PNG
png          pixels as the bytes of a PNG file
derivatives  of score functions: derivative, gathers
algebra      nodes of real arithmetic, cleaned up as they are built
text         a node as a person would write it
"""
