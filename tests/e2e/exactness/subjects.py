"""The models whose answers are compared, and what each of them is asked.

Real weights are asked about real text. Tiny random models have no tokenizer: they are given tokens
drawn from a seed, and forget nothing of them, so that a lost state shows.
"""

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from dense_models import DENSE
from gemma import BOS, gemma_model
from hybrid_models import PLAIN, TINY, VOCABULARY
from quire.models import embedded_model, load_tokenizer

ROOT = Path(__file__).parents[3]
PAGE = 16
NOISE = 1e-3
"""Logits differ by less than this, between chunk sizes, batches and ranks, in fp32. Measured: up
to 2e-4 with real weights, whose logits reach 30; up to 4e-4 with the random ones, as much as stock
transformers differs from itself when it is given the prompt in chunks (Qwen3Next: 3e-4). Another
beginning of the prompt changes logits by more than 0.3."""
_FIRST_TOKEN = 3
"""Lower ones are special."""

Prompt = list[int]


@dataclass(frozen=True)
class Subject:
    name: str
    find: Callable[[], Path]
    """Its directory; made at first use."""
    read: Callable[[], Prompt]
    """Tokens of a long text, to cut prompts from."""
    ask: Callable[[], list[Prompt]]
    """Prompts with common beginnings among them, none a whole number of pages long: the last
    token of a prompt is computed in any case, and so would be the last page."""
    components: tuple[str, ...]
    length: int
    """Tokens of a prompt that goes well beyond the model's window, if it has one."""
    num_tokens: int = 12
    """Of an answer."""
    is_quick: bool = False
    """It computes in no time: it is asked more."""
    options: tuple[tuple[str, Any], ...] = field(default=(), compare=False)
    """Of every engine for it."""

    def __str__(self) -> str:
        return self.name

    @property
    def threads(self) -> int:
        """For an engine: of a tiny model threads would only wait for each other."""
        return 1 if self.is_quick else 0

    def under(self, **options: Any) -> "Subject":
        return replace(self, options=tuple(options.items()))

    def cut(self, start: int, count: int) -> Prompt:
        tokens = self.read()[start : start + count]
        assert len(tokens) == count
        return tokens

    def two(self) -> list[Prompt]:
        """Prompts with nothing in common."""
        return [self.cut(0, self.length), self.cut(self.length, self.length)]


# ---- real weights --------------------------------------------------------------------------------


@cache
def _chats() -> list[Prompt]:
    """Chat, a document asked about twice, code, a second turn, another language."""
    tokenizer = load_tokenizer(embedded_model())
    document = (ROOT / "docs/embedding.md").read_text()[:1500]
    code = (ROOT / "src/quire/sizes.py").read_text()[:700]
    turns = [
        [("user", "Write three sentences about the sea, the wind and the harbour.")],
        [("user", f"{document}\n\nWhich call may block?")],
        [("user", f"{document}\n\nWhat must an engine do when a load has failed?")],
        [("user", f"Explain this code.\n```python\n{code}\n```")],
        [
            ("user", "Name two rivers in France."),
            ("assistant", "The Loire and the Rhône."),
            ("user", "Which of them is longer, and through which towns does it flow?"),
        ],
        [("user", "Erzähle mir in wenigen Sätzen, wie ein Buch gebunden wird.")],
    ]
    prompts: list[Prompt] = []
    for turn in turns:
        messages = [{"role": role, "content": text} for role, text in turn]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        prompts.append([int(token) for token in ids])  # type: ignore[arg-type]
    return prompts


@cache
def _text(find: Callable[[], Path], *first: int) -> Prompt:
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids: Prompt = load_tokenizer(find())(text[:30_000], add_special_tokens=False)["input_ids"]
    return [*first, *ids]


def _gemma_text() -> Prompt:
    return _text(gemma_model, BOS)


@cache
def _gemma_prompts() -> list[Prompt]:
    """A long text with two continuations, and a short one."""
    text = _gemma_text()
    return [text[:725], text[:690] + text[1500:1533], [BOS, *text[2000:2070]]]


# ---- random weights ------------------------------------------------------------------------------

_WRITERS = TINY | PLAIN | {f"dense_{name}": write for name, write in DENSE.items()}
_WITH_WINDOWS = ("qwen2_windows", "qwen3_biases", "gemma3")


@cache
def _tiny_folder(name: str) -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix=f"quire-{name}-")
    _WRITERS[name](Path(folder.name))
    return folder


@cache
def _random_text() -> Prompt:
    rng = random.Random(11)
    return [rng.randrange(_FIRST_TOKEN, VOCABULARY) for _ in range(4000)]


@cache
def _random_prompts() -> list[Prompt]:
    text = _random_text()
    return [
        text[:150],
        text[:100] + text[1000:1035],
        text[:100] + text[1100:1190],
        text[2000:2070],
        text[3000:3250],
    ]


def _tiny(name: str, *components: str) -> Subject:
    return Subject(
        name,
        lambda: Path(_tiny_folder(name).name),
        _random_text,
        _random_prompts,
        ("full", *components),
        length=165,
        is_quick=True,
    )


# ---- all of them ---------------------------------------------------------------------------------

SMOLLM2 = Subject(
    "smollm2", embedded_model, lambda: _text(embedded_model), _chats, ("full",), length=165
)
GEMMA = Subject(
    "gemma3_270m",
    gemma_model,
    _gemma_text,
    _gemma_prompts,
    ("full", "window"),
    length=725,
    num_tokens=6,
)
TINY_LLAMA = _tiny("llama")
"""Full attention only, for what would take too long with real weights."""
TINY_SUBJECTS = [
    _tiny("falcon_h1", "recurrent"),
    _tiny("nemotron_h", "recurrent"),
    _tiny("qwen3_next", "recurrent"),
    _tiny("lfm2", "recurrent"),
    _tiny("granite_moe_hybrid", "recurrent"),
    _tiny("gemma3", "window"),
    _tiny("gpt_oss", "window"),
]
HYBRIDS = [GEMMA, *TINY_SUBJECTS]
DENSE_SUBJECTS = [
    _tiny(f"dense_{name}", *(["window"] if name in _WITH_WINDOWS else [])) for name in DENSE
]
