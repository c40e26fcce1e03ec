"""Twenty attention variants, each a spec in a few lines. docs/gallery.md shows them with their tiles and kernels.

    flashgen show examples/gallery.py:neighbourhood --what tiles --len-q 2048   # any of them, by name
    flashgen verify examples/gallery.py:neighbourhood --emulate                 # against NumPy

A cell begins with `# %%`. To port a variant of your own, copy the nearest cell and change its function. Arrays are
declared by name, as in `fg.document("ids")`, and given to each call: `attention(q, k, v, ids=ids)`. The first argument
of `AttentionSpec` is the head dim; dtype is float16 unless given.
"""

import flashgen as fg

# %% Causal
# A query attends to the keys up to its own position. Its tiles have a closed form: nothing is read to find them.
causal = fg.AttentionSpec(128, "bfloat16", mask=fg.causal())

# %% Sliding window
# The last 1024 keys before each query, as in Mistral. The number of visited tiles grows linearly with the length.
window = fg.AttentionSpec(64, mask=fg.causal() & fg.sliding_window(1024))

# %% Prefix LM
# All queries attend to a prefix, and causally to the rest, as in T5 and PaliGemma.
prefix = fg.AttentionSpec(64, mask=fg.prefix_lm(256))

# %% Packed documents
# Several documents in one sequence, without attention across them. `ids` has the number of each token's document.
documents = fg.AttentionSpec(64, mask=fg.causal() & fg.document("ids"))

# %% Padding
# A batch of sequences of different lengths. `lengths` is read by the kernel, so that new lengths change nothing.
padding = fg.AttentionSpec(64, mask=fg.padding("lengths"))


# %% Chunks
# Causal attention within chunks of 512 tokens, as in Llama 4.
def same_chunk(b, h, q, k):
    return q // 512 == k // 512


chunks = fg.AttentionSpec(64, mask=fg.causal() & same_chunk)

# %% Dilated window
# Every 256th key of the last 1500, as in LongNet and Longformer.
dilated = fg.AttentionSpec(64, mask=fg.causal() & fg.dilated_window(1500, 256))


# %% Global tokens and a window
# A window, and 32 tokens of every 640 that attend to everything and are attended to by everything, as in Longformer.
def near_or_global(b, h, q, k):
    return (abs(q - k) <= 100) | (q % 640 < 32) | (k % 640 < 32)


global_window = fg.AttentionSpec(64, mask=near_or_global)


# %% Text and pictures
# Causal for text; tokens of one picture attend to each other in both directions, as in Transfusion. `picture` is 0 for
# text, and the number of the picture otherwise.
picture = fg.Tensor("picture", "int32", ndim=1)


def earlier_or_same_picture(b, h, q, k):
    return (k <= q) | ((picture[q] == picture[k]) & (picture[q] > 0))


text_and_pictures = fg.AttentionSpec(64, mask=earlier_or_same_picture)


# %% 2-D neighbourhood
# The 13 × 13 pixels around each pixel of a picture of 64 columns, moved inwards at its edges, as in NATTEN.
def near_pixels(b, h, q, k):
    rows, columns, radius = fg.len_q // 64, 64, 6
    row = fg.clamp(q // columns, radius, rows - 1 - radius)
    column = fg.clamp(q % columns, radius, columns - 1 - radius)
    return (abs(row - k // columns) <= radius) & (abs(column - k % columns) <= radius)


neighbourhood = fg.AttentionSpec(64, mask=near_pixels)


# %% Tiles of a video
# A video of 16 × 16 pixels, in tiles of 2 frames × 8 × 8 pixels that are stored one after the other, 128 tokens each. A
# tile attends to itself and the tiles next to it, as in Sliding Tile Attention.
def near_tiles(b, h, q, k):
    def place(token):
        tile = token // 128
        return tile // 4, tile // 2 % 2, tile % 2

    (frame_q, row_q, column_q), (frame_k, row_k, column_k) = place(q), place(k)
    return (abs(frame_q - frame_k) <= 1) & (abs(row_q - row_k) + abs(column_q - column_k) <= 1)


video = fg.AttentionSpec(64, mask=near_tiles)


# %% Block diffusion
# A noised copy of the text before the clean one. A noised block of 160 tokens attends to itself and to the clean blocks
# before it, a clean block to the clean blocks up to its own.
def diffusion(b, h, q, k):
    half = fg.len_q // 2
    noised_q, noised_k = q < half, k < half
    block_q, block_k = q % half // 160, k % half // 160
    itself = (block_q == block_k) & (noised_q == noised_k)
    context = (block_q > block_k) & noised_q & ~noised_k
    return itself | context | ((block_q >= block_k) & ~noised_q & ~noised_k)


block_diffusion = fg.AttentionSpec(64, mask=diffusion)

# %% Selected blocks
# Blocks of 64 × 64 that something else has selected, as in BigBird and Native Sparse Attention. `layout` may be a
# boolean array or an `fg.BlockLayout`.
selected = fg.AttentionSpec(64, mask=fg.block_sparse("layout", 64, 64))

# %% Drafted tree
# Speculative decoding: drafted tokens attend to everything before the draft, and to their ancestors in a tree.
# `fg.tree_bits(parents)` makes `bits`.
tree = fg.AttentionSpec(64, mask=fg.tree("bits"))

# %% ALiBi
# A linear penalty of the distance, with one slope per head. With `grad=True` in its Tensor, the slopes are learned.
alibi = fg.AttentionSpec(64, mask=fg.causal(), score=fg.alibi("slopes"))

# %% Softcap
# Scores are capped smoothly at ±30, as in Gemma 2.
softcap = fg.AttentionSpec(64, mask=fg.causal(), score=fg.softcap(30))

# %% Relative bias
# A learned bias for each head and distance up to 128, as in T5 and Swin.
table = fg.Tensor("table", "float32", ndim=2, grad=True)
relative = fg.AttentionSpec(64, score=fg.relative_bias(table, 128))

# %% Pair bias
# A learned bias for each head and pair of positions, as in AlphaFold's pair representation.
pairs = fg.Tensor("pairs", "float32", ndim=3, grad=True)


def add_pairs(score, b, h, q, k):
    return score + pairs[h, q, k]


pair_bias = fg.AttentionSpec(64, score=add_pairs)

# %% Sinks
# A window of 128 keys and a learned score per head that takes probability but has no value, as in gpt-oss.
sinks = fg.Tensor("sinks", "float32", ndim=1, grad=True)
sink_window = fg.AttentionSpec(64, mask=fg.sliding_window(127), sink=sinks)

# %% Latent attention
# Keys of 128 columns and 64 columns with rotary positions, and values of 128, as in the prefill of DeepSeek-V3.
latent = fg.AttentionSpec(192, "bfloat16", value_dim=128, mask=fg.causal())
