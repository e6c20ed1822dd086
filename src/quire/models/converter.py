"""`python -m quire.models.converter SOURCE TARGET`: one GGUF file into one directory.

Started by quire.models.gguf, never by hand. Says what it does on standard output, one JSON object
a line: {"what", "done"} or, once and last, {"error"}. Ends when its standard input does.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from quire.child import when_orphaned
from quire.errors import QuireError
from quire.models.header import read_header
from quire.progress import Share

_EXIT_FAILED = 1
_SHARD_SIZE = "5GB"

Item = TypeVar("Item")


def convert(source: Path, target: Path, report: Share) -> None:
    """Raises what transformers raises, and ValueError where it would go on with random weights.

    Whether the engine can serve the model is not asked here: who loads it asks."""
    report("reading the tokenizer", 0.0)
    import gguf
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers import modeling_gguf_pytorch_utils as reader

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # Three changes to libraries, in a process that does nothing else. The one place that knows how
    # far it is has its progress bar become our report; a table that is built anew for every module
    # of the model, a third of the whole time, is built once; and the file, which is opened for the
    # tokenizer, the configuration and the weights, has its vocabulary read once.
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # type: ignore[misc, assignment]
    bar = _reporting(lambda done: report("unpacking weights", 0.7 + 0.2 * done))
    reader.tqdm = bar  # type: ignore[attr-defined]

    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    report("reading the configuration", 0.25)
    config = AutoConfig.from_pretrained(source.parent, **where)
    report("finding the weights", 0.4)
    load: Any = AutoModelForCausalLM.from_pretrained  # its types do not know the second result
    model, info = load(
        source.parent,
        config=config,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **where,
    )
    if missing := sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}):
        raise ValueError(f"weights are missing or of a wrong shape, such as {missing[0]}")
    report("writing", 0.9)
    # The weights are plain float32 by now. Still marked as quantised, they would not be saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    header = read_header(source)
    _narrow(model, header.kinds)
    _add_end_of_turn(model.generation_config, header.fields.get("tokenizer.ggml.eot_token_id"))
    model.save_pretrained(target, max_shard_size=_SHARD_SIZE)
    tokenizer.save_pretrained(target)
    report("writing", 1.0)


def _narrow(model: Any, kinds: frozenset[int]) -> None:
    """Weights back in the precision that the file has them in, each if nothing of it is lost. What
    was quantised stays float32: only there is a scale times a small integer exact."""
    import torch
    from gguf import GGMLQuantizationType as Kind

    halves = {Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
    if not kinds <= {int(kind) for kind in (Kind.F32, *halves)}:
        return
    for weight in (*model.parameters(), *model.buffers()):
        if weight.dtype is not torch.float32:
            continue
        for kind, dtype in halves.items():
            narrow = weight.data.to(dtype)
            if int(kind) in kinds and torch.equal(narrow.float(), weight.data):
                weight.data = narrow
                break


def _add_end_of_turn(generation: Any, end_of_turn: object) -> None:
    """A file may name, beside the end of text, the token that ends an answer in a chat."""
    ends = generation.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if isinstance(end_of_turn, int) and end_of_turn not in ends:
        generation.eos_token_id = [*ends, end_of_turn]


def _reporting(report: Callable[[float], None]) -> Callable[..., Iterator[Any]]:
    def bar(items: Iterable[Item], **_: object) -> Iterator[Item]:
        listed = list(items)
        for index, item in enumerate(listed):
            yield item
            report((index + 1) / len(listed))

    return bar


def main() -> None:
    source, target = Path(sys.argv[1]).absolute(), Path(sys.argv[2])
    # Our own copy of standard output; what libraries print goes with their complaints.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    when_orphaned(0, lambda: True, grace_s=0.0)

    def report(what: str, done: float) -> None:
        out.write(json.dumps({"what": what, "done": done}) + "\n")

    try:
        convert(source, target, report)
    except Exception as error:  # the boundary of this process: the parent turns it into an error
        text = str(error) if isinstance(error, QuireError | ValueError) else repr(error)
        out.write(json.dumps({"error": " ".join(text.split())[:500]}) + "\n")
        out.flush()
        os._exit(_EXIT_FAILED)


if __name__ == "__main__":
    main()
