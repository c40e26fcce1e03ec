"""Trains GPT-2 124M on the text that ships with Python, with flashgen's attention or another one.

    python examples/train_gpt2.py --steps 300 --attention flashgen --compile
    python examples/train_gpt2.py --emulate   # a tiny model on the CPU with flashgen's emulator

The loss curve is written to gpt2-<attention>.svg, and the model with losses and AdamW state to
gpt2-<attention>.safetensors, from which --resume continues. The attention of the model is one line: see `attention_of`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flashgen as fg

try:
    import torch
    from rich.progress import track
    from safetensors.torch import load_file, save_file
    from torch.nn import functional

    from flashgen.torch import attention
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    needed = "pip install 'flashgen[torch]' safetensors"
    raise SystemExit(f"error: this example needs torch and safetensors ({error}): {needed}") from None

sys.path.insert(0, str(Path(__file__).parents[1]))  # the root of the repository, for the model in benchmarks/
from benchmarks.gpt2 import GPT2, Config, batches, optimizer_of

FULL = {"steps": 300, "batch": 32, "length": 1024}
TRIAL = {"steps": 9, "batch": 2, "length": 64}  # less than a minute on the emulator


def standard(q: Any, k: Any, v: Any) -> Any:
    """Standard attention, which materializes the matrices of scores and weights."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(
        torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1), float("-inf")
    )
    return scores.softmax(-1).to(v.dtype) @ v


def attention_of(name: str, head_dim: int, emulate: bool) -> Callable[..., Any]:
    """Returns a function for causal attention of q, k, v (batch, heads, length, dim)."""
    spec = fg.AttentionSpec(head_dim, "bfloat16", mask=fg.causal())
    return {
        "flashgen": partial(attention, spec, emulate=emulate),
        "sdpa": partial(functional.scaled_dot_product_attention, is_causal=True),
        "standard": standard,
    }[name]


def curve(losses: Sequence[float], name: str) -> str:
    """Returns the loss curve as SVG."""
    low, high = min(losses), max(losses)
    points = " ".join(
        f"{40 + 720 * i / max(len(losses) - 1, 1):.1f},{20 + 340 * (high - loss) / max(high - low, 1e-9):.1f}"
        for i, loss in enumerate(losses)
    )
    labels = f'<text x="4" y="24">{high:.2f}</text><text x="4" y="364">{low:.2f}</text>'
    labels += f'<text x="320" y="392">loss of {len(losses)} steps, {name}</text>'
    line = f'<polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="2"/>'
    style = 'font-family="sans-serif" font-size="14"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 400" {style}>{labels}{line}</svg>\n'


def optimizer_state(optimizer: Any, model: Any) -> dict[str, Any]:
    """Returns the state that AdamW keeps for each parameter, by the parameter's name."""
    named = model.named_parameters()
    return {f"adamw.{name}.{key}": value for name, one in named for key, value in optimizer.state[one].items()}


def load_optimizer_state(optimizer: Any, model: Any, state: dict[str, Any]) -> None:
    """Moves the optimizer's entries of a saved state into the optimizer."""
    for name, parameter in model.named_parameters():
        prefix = f"adamw.{name}."
        names = [each for each in state if each.startswith(prefix)]
        optimizer.state[parameter] = {each.removeprefix(prefix): state.pop(each) for each in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=("flashgen", "sdpa", "standard"), default="flashgen")
    parser.add_argument("--steps", type=int, help="default 300, with --emulate 9")
    parser.add_argument("--batch", type=int, help="default 32, with --emulate 2")
    parser.add_argument("--length", type=int, help="default 1024, with --emulate 64")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--resume", action="store_true", help="continue from the saved model")
    parser.add_argument("--tiny", action="store_true", help="a model with 2 layers of 2 heads of 16, for a trial")
    parser.add_argument("--emulate", action="store_true", help="run on the CPU with flashgen's emulator, as --tiny")
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    if not options.emulate and not torch.cuda.is_available():
        raise SystemExit("error: there is no GPU that torch can use; try --emulate")
    device = "cpu" if options.emulate else "cuda"
    for name, default in (TRIAL if options.emulate else FULL).items():
        setattr(options, name, getattr(options, name) or default)
    sizes = {"vocabulary": 256, "layers": 2, "heads": 2, "width": 32} if options.tiny or options.emulate else {}
    config = Config(options.length, **sizes)
    torch.manual_seed(0)
    model = GPT2(config, attention_of(options.attention, config.width // config.heads, options.emulate)).to(device)
    optimizer, batch_of_step = optimizer_of(model), batches(options.batch, options.length, 0, device)
    saved, begin, losses = options.folder / f"gpt2-{options.attention}.safetensors", 0, []
    if options.resume:
        state = load_file(saved, device=device)
        losses = state.pop("losses").tolist()
        begin = len(losses)
        load_optimizer_state(optimizer, model, state)
        model.load_state_dict(state)
    call = torch.compile(model) if options.compile else model
    for step in track(range(begin, options.steps), f"training with {options.attention}"):
        with torch.autocast(device, torch.bfloat16):
            loss = call(*batch_of_step(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    losses = [float(loss) for loss in losses]
    save_file({**model.state_dict(), **optimizer_state(optimizer, model), "losses": torch.tensor(losses)}, saved)
    saved.with_suffix(".svg").write_text(curve(losses, options.attention), encoding="utf-8")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps; {saved} and {saved.with_suffix('.svg')}")


if __name__ == "__main__":
    try:
        main()
    except fg.errors.FlashgenError as error:
        raise SystemExit(f"error: {error}") from None
