"""Pictures of what is proven: a tile map, or the elements of one tile.

tile_maps    as text for a terminal, as SVG and as PNG
cell_grid    a grid of coloured cells, which both are
png          pixels as the bytes of a PNG file
"""
