"""Pictures of what is proven: a tile map, or the elements of one tile.

tile_maps    as text for a terminal, as SVG and as PNG
cell_grid    the grid of coloured cells that both become
png          pixels as the bytes of a PNG file
"""
