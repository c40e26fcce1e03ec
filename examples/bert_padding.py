"""Runs transformers' BERT on padded sequences with attn_implementation="flashgen", and compares it with "eager".

    python examples/bert_padding.py             # needs a GPU, torch and transformers
    python examples/bert_padding.py --emulate   # on the CPU with flashgen's emulator

Weights are random, so nothing is downloaded; use AutoModel.from_pretrained(..., attn_implementation="flashgen") for
trained ones.
"""

from __future__ import annotations

import argparse

try:
    import torch
    from transformers import BertConfig, BertModel

    import flashgen.transformers
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    needed = "pip install 'flashgen[transformers]'"
    raise SystemExit(f"error: this example needs torch and transformers ({error}): {needed}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", action="store_true", help="run on the CPU with flashgen's emulator")
    emulate = parser.parse_args().emulate
    if not emulate and not torch.cuda.is_available():
        raise SystemExit("error: there is no GPU that torch can use; try --emulate")
    flashgen.transformers.register(emulate=emulate)  # only this and the name below are needed

    device, longest = ("cpu", 48) if emulate else ("cuda", 512)
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=2, hidden_size=128, num_attention_heads=4, intermediate_size=256)
    model = BertModel(config).to(device).eval()
    lengths = torch.tensor([longest, longest // 2, longest // 5])
    tokens = torch.randint(5, config.vocab_size, (3, longest), device=device)
    kept = (torch.arange(longest) < lengths[:, None]).to(device)

    results = {}
    for name in ("eager", "flashgen"):
        model.set_attn_implementation(name)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=name == "flashgen"):
            results[name] = model(tokens, attention_mask=kept.long()).last_hidden_state.float()
    error = (results["flashgen"] - results["eager"])[kept].abs().max().item()
    print(f"sequences of {lengths.tolist()} tokens: the hidden states differ by at most {error:.1e}")
    if error > 5e-2:
        raise SystemExit("error: the difference exceeds the rounding of bfloat16")


if __name__ == "__main__":
    try:
        main()
    except flashgen.errors.FlashgenError as error:
        raise SystemExit(f"error: {error}") from None
