"""Serves a Llama with random weights by continuous batching, with flashgen over pages and with torch's SDPA.

    python examples/serve.py --size 1b               # needs a GPU and torch
    python examples/serve.py --emulate --check        # on the CPU with flashgen's emulator

Requests wait for a slot and for pages. Chunks of a prompt are processed together with the decoding sequences, in one
launch per layer. Prompts with a common prefix share pages. When pages run out, the youngest sequence is evicted and
queued again. On a GPU, a decode step is one captured graph. --check compares every token with a forward pass without a
cache. See examples/serving/.
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
    requests = draw_requests(options, model.size.vocabulary)
    prompts, wanted = (sum(counts) for counts in zip(*((len(r.tokens), r.wanted) for r in requests), strict=True))
    print(f"{options.size}: {len(requests)} requests, {prompts} prompt tokens, {wanted} tokens to generate")
    for name in options.attention.split(","):
        server = create_server(name, model, options)
        if not options.emulate:
            server.run(requests[: options.slots])  # compiles and captures
            server.counts.clear()
        seconds, served = run_timed(server, requests, device)
        counts = server.counts
        print(
            f"{name:8} {wanted / seconds:10.1f} tokens/s generated, {(prompts + wanted) / seconds:10.1f} with prompts; "
            f"{counts['steps']} steps, {counts['shared']} tokens shared, {counts['evicted']} evicted"
        )
        if options.check:
            print(f"{name:8} {check(model, requests, served)}")
        del server
        if not options.emulate:
            torch.cuda.empty_cache()


def arguments() -> argparse.Namespace:
    """Parses the command line and fills in defaults that depend on the size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, help="default 1b, with --emulate tiny")
    parser.add_argument("--attention", default="flashgen,sdpa", help="flashgen, sdpa, or both, comma-separated")
    parser.add_argument("--requests", type=int, help="number of requests")
    parser.add_argument("--prompt", type=int, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, help="largest number of tokens to generate for a request")
    parser.add_argument("--prefix", type=int, help="tokens of the prefix that all prompts share")
    parser.add_argument("--slots", type=int, help="sequences that decode together")
    parser.add_argument(
        "--pages", type=int, help="pages of the cache; the default suffices for a third of the slots at full length"
    )
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--chunk", type=int, help="prompt tokens per step")
    parser.add_argument("--emulate", action="store_true", help="run on the CPU with flashgen's emulator")
    parser.add_argument("--check", action="store_true", help="compare every token with a forward pass without a cache")
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


def draw_requests(options: argparse.Namespace, vocabulary: int) -> list[Request]:
    """Draws requests with log-uniform lengths and a common prefix."""
    rng = random.Random(0)
    prefix = [rng.randrange(vocabulary) for _ in range(options.prefix)]
    requests = []
    for number in range(options.requests):
        length = round(math.exp(rng.uniform(math.log(options.prefix + 1), math.log(options.prompt))))
        own = [rng.randrange(vocabulary) for _ in range(length - options.prefix)]
        wanted = round(math.exp(rng.uniform(math.log(max(1, options.new // 8)), math.log(options.new))))
        requests.append(Request(number, prefix + own, wanted))
    return requests


def create_server(name: str, model: Llama, options: argparse.Namespace) -> Server:
    """Returns a server for one of the two implementations of attention, with equally many pages."""
    pool = Pool(options.pages, options.page_size)
    attention: Any
    if name == "flashgen":
        attention = Paged(model, options.pages, options.page_size, options.emulate)
    elif name == "sdpa":
        attention = Dense(model, options.slots, options.longest)
    else:
        raise SystemExit(f"error: --attention {name}: use flashgen, sdpa, or both, comma-separated")
    return Server(model, attention, pool, options.slots, options.longest, options.chunk, not options.emulate)


def run_timed(server: Server, requests: list[Request], device: str) -> tuple[float, dict[int, list[int]]]:
    """Returns the seconds from the first request to the last token, and all tokens."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    served = server.run(requests)
    synchronize()
    return time.perf_counter() - start, served


@torch.inference_mode()
def check(model: Llama, requests: list[Request], served: dict[int, list[int]]) -> str:
    """Checks that a forward pass without a cache, over all previous tokens, selects the same tokens.

    Where two scores are closer than rounding, either token is accepted: with E the largest difference between scores in
    the model's dtype and in float64, the score of a token may be 4·E below the largest. Raises SystemExit otherwise.
    """
    exact = model.to(torch.float64)
    equal = count = 0
    for request in requests:
        tokens = torch.tensor(served[request.number], device=model.device)
        length = len(request.tokens) + request.wanted
        if tokens.tolist()[: len(request.tokens)] != request.tokens or len(tokens) != length:
            raise SystemExit(f"error: request {request.number} has lost its prompt or some tokens")
        positions = torch.arange(len(tokens) - 1, device=model.device)
        generated = slice(len(request.tokens) - 1, None)
        low, ref = (m.logits(m.forward(tokens[:-1], positions, plain)[generated]).double() for m in (model, exact))
        below = ref.amax(-1) - ref.gather(-1, tokens[generated][1:, None])[:, 0]
        if (below > 4 * (low - ref).abs().max()).any():
            raise SystemExit(f"error: request {request.number} has tokens that a pass without a cache does not select")
        equal += int((below == 0).sum())
        count += len(below)
    return f"{count} tokens checked: {equal} equal float64's without a cache, {count - equal} are within rounding"


if __name__ == "__main__":
    try:
        main()
    except (fg.errors.FlashgenError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
