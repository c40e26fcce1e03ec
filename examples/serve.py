"""Continuous batching of a Llama with random weights: flashgen over pages, beside the same loop over torch's SDPA.

    python examples/serve.py --size 1b               # needs a GPU and torch
    python examples/serve.py --emulate --check        # on the CPU, by flashgen's emulator

Requests wait for a slot and for pages; a prompt is taken in chunks beside the sequences that decode, in one launch a
layer; prompts that begin alike share pages; where pages run out, the youngest sequence gives its own up and comes back.
A decode step on a GPU is one captured graph. --check compares every token with a forward pass without a cache. See
examples/serving/.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from typing import Any

import flashgen as fg

try:
    import torch
    from serving.attention import Dense, Paged, plain
    from serving.llama import SIZES, Llama
    from serving.loop import Server
    from serving.pages import Pool
    from serving.state import Request
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    raise SystemExit(f"error: this example needs torch ({error}): pip install 'flashgen[torch]'") from None


def main() -> None:
    options = arguments()
    if not options.emulate and not torch.cuda.is_available():
        raise SystemExit("error: there is no GPU that torch can use; try --emulate")
    device = "cpu" if options.emulate else "cuda"
    model = Llama(SIZES[options.size], torch.float16 if options.size == "tiny" else torch.bfloat16, device)
    requests = drawn(options, model.size.vocabulary)
    prompts, wanted = (sum(counts) for counts in zip(*((len(r.tokens), r.wanted) for r in requests), strict=True))
    print(f"{options.size}: {len(requests)} requests, {prompts} tokens of prompts, {wanted} to be made")
    for name in options.attention.split(","):
        server = server_of(name, model, options)
        if not options.emulate:
            server.run(requests[: options.slots])  # compiles, and captures
            server.counts.clear()
        seconds, served = timed(server, requests, device)
        counts = server.counts
        print(
            f"{name:8} {wanted / seconds:10.1f} tokens/s made, {(prompts + wanted) / seconds:10.1f} with prompts; "
            f"{counts['steps']} steps, {counts['shared']} tokens shared, {counts['evicted']} evicted"
        )
        if options.check:
            print(f"{name:8} {check(model, requests, served)}")
        del server
        if not options.emulate:
            torch.cuda.empty_cache()


def arguments() -> argparse.Namespace:
    """Of the command line; what a size leaves open is filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, help="1b, and with --emulate tiny")
    parser.add_argument("--attention", default="flashgen,sdpa", help="of flashgen and sdpa, by commas")
    parser.add_argument("--requests", type=int, help="how many")
    parser.add_argument("--prompt", type=int, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, help="tokens made for the most demanding request")
    parser.add_argument("--prefix", type=int, help="tokens that all prompts begin with")
    parser.add_argument("--slots", type=int, help="sequences that decode together")
    parser.add_argument(
        "--pages", type=int, help="pages of the cache; the default is enough for a third of all slots at their longest"
    )
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--chunk", type=int, help="tokens of a prompt that a step takes")
    parser.add_argument("--emulate", action="store_true", help="on the CPU, by flashgen's emulator")
    parser.add_argument("--check", action="store_true", help="every token beside a forward pass without a cache")
    options = parser.parse_args()
    options.size = options.size or ("tiny" if options.emulate else "1b")
    tiny = {"requests": 5, "prompt": 40, "new": 16, "prefix": 18, "slots": 3, "chunk": 24}
    large = {"requests": 256, "prompt": 4096, "new": 1024, "prefix": 512, "slots": 64, "chunk": 1024}
    for name, value in (tiny if options.size == "tiny" else large).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.longest = -(-(options.prompt + options.new) // 256) * 256
    if options.pages is None:
        options.pages = -(-options.slots * (options.prompt + options.new) // (3 * options.page_size)) + 1
    return options


def drawn(options: argparse.Namespace, vocabulary: int) -> list[Request]:
    """Requests whose lengths are log-uniform, and whose prompts begin alike."""
    rng = random.Random(0)
    prefix = [rng.randrange(vocabulary) for _ in range(options.prefix)]
    requests = []
    for number in range(options.requests):
        length = round(math.exp(rng.uniform(math.log(options.prefix + 1), math.log(options.prompt))))
        own = [rng.randrange(vocabulary) for _ in range(length - options.prefix)]
        wanted = round(math.exp(rng.uniform(math.log(max(1, options.new // 8)), math.log(options.new))))
        requests.append(Request(number, prefix + own, wanted))
    return requests


def server_of(name: str, model: Llama, options: argparse.Namespace) -> Server:
    """The loop over one of the two attentions; the pages that it counts by are the same."""
    pool = Pool(options.pages, options.page_size)
    attention: Any
    if name == "flashgen":
        attention = Paged(model, options.pages, options.page_size, options.emulate)
    elif name == "sdpa":
        attention = Dense(model, options.slots, options.longest)
    else:
        raise SystemExit(f"error: --attention {name}: give flashgen, sdpa, or both by a comma")
    return Server(model, attention, pool, options.slots, options.longest, options.chunk, not options.emulate)


def timed(server: Server, requests: list[Request], device: str) -> tuple[float, dict[int, list[int]]]:
    """Seconds from the first request to the last token, and all tokens."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    served = server.run(requests)
    wait()
    return time.perf_counter() - start, served


@torch.inference_mode()
def check(model: Llama, requests: list[Request], served: dict[int, list[int]]) -> str:
    """That every token is what a forward pass over all tokens before it takes, without a cache.

    Where two scores are closer than rounding, either token may be taken: with E the distance of scores in the model's
    dtype from those in float64, a token's score may be 4·E below the largest. Raises SystemExit for any other.
    """
    exact = model.to(torch.float64)
    alike = count = 0
    for request in requests:
        tokens = torch.tensor(served[request.number], device=model.device)
        length = len(request.tokens) + request.wanted
        if tokens.tolist()[: len(request.tokens)] != request.tokens or len(tokens) != length:
            raise SystemExit(f"error: request {request.number} has lost its prompt, or tokens")
        places = torch.arange(len(tokens) - 1, device=model.device)
        made = slice(len(request.tokens) - 1, None)
        low, ref = (m.logits(m.forward(tokens[:-1], places, plain)[made]).double() for m in (model, exact))
        below = ref.amax(-1) - ref.gather(-1, tokens[made][1:, None])[:, 0]
        if (below > 4 * (low - ref).abs().max()).any():
            raise SystemExit(f"error: request {request.number} has tokens that a pass without a cache does not take")
        alike += int((below == 0).sum())
        count += len(below)
    return f"{count} tokens checked: {alike} are float64's own without a cache, {count - alike} within rounding of them"


if __name__ == "__main__":
    try:
        main()
    except (fg.errors.FlashgenError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
