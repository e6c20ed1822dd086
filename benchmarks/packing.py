"""How much smaller real KV gets when it is packed, and what that takes of one core.

    python benchmarks/packing.py [--tokens N]

The KV that the embedded model computes for text of our documents, in pages of 16 tokens, by each
codec: the table of docs/stores.md, as Markdown. What is smaller counts in blocks, as it is stored.
Seconds are the processor's, so that others at work on the machine change them less.
"""

import argparse
import time
from pathlib import Path
from statistics import median

import torch

from quire.models import embedded_model, load_model, load_tokenizer
from quire.store.base import HEADER_BYTES
from quire.store.packing import Packer, PackKind, unpack

PAGE_TOKENS, ROUNDS = 16, 5
DOCS = Path(__file__).parents[1] / "docs"


def pages_of_kv(num_tokens: int, dtype: torch.dtype) -> list[memoryview]:
    text = "\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    folder = embedded_model()
    tokens = load_tokenizer(folder)(text[: 8 * num_tokens])["input_ids"][:num_tokens]
    model = load_model(folder, dtype=dtype, device=torch.device("cpu"), attention="sdpa")
    with torch.inference_mode():
        layers = model(torch.tensor([tokens]), use_cache=True).past_key_values.layers
        # layers, keys and values, heads, tokens, numbers of a head
        kv = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in layers])
        each = kv.transpose(2, 3).split(PAGE_TOKENS, dim=2)
        return [
            memoryview(page.contiguous().view(torch.uint8).numpy().reshape(-1)) for page in each
        ]


def measured(kind: PackKind, pages: list[memoryview]) -> tuple[float, float, float]:
    """How many times smaller; GB/s packed and unpacked, of what the pages were."""
    total, packer = sum(page.nbytes for page in pages), Packer(kind)
    rooms = [memoryview(bytearray(page.nbytes)) for page in pages]
    into = [memoryview(bytearray(page.nbytes)) for page in pages]
    packs, unpacks = [], []
    for _ in range(ROUNDS):
        began_s = time.thread_time()
        packed = [packer.pack(page, room) for page, room in zip(pages, rooms, strict=True)]
        packed_s = time.thread_time()
        for how, room, page in zip(packed, rooms, into, strict=True):
            assert how is not None
            assert unpack(how, room, page)
        packs.append(total / (packed_s - began_s) / 1e9)
        unpacks.append(total / (time.thread_time() - packed_s) / 1e9)
    assert into == pages
    blocks = sum(-(-how.packed_bytes // HEADER_BYTES) for how in packed if how is not None)
    return total / (blocks * HEADER_BYTES), median(packs), median(unpacks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    num_tokens = parser.parse_args().tokens
    print("| | numbers | smaller by | packs | unpacks |\n|---|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        pages = pages_of_kv(num_tokens, dtype)
        for kind in (PackKind.ZSTD, PackKind.LZ4):
            ratio, packs, unpacks = measured(kind, pages)
            name = str(dtype).removeprefix("torch.")
            print(f"| {kind} | {name} | {ratio:.2f} × | {packs:.2f} GB/s | {unpacks:.2f} GB/s |")


if __name__ == "__main__":
    main()
