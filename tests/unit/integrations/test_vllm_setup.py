"""What of vLLM's configuration is served, and how a request is named."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mini_vllm import MiniRequest
from quire.errors import ConfigError, QuireError
from quire.integrations.vllm.naming import Naming
from quire.integrations.vllm.options import read_options
from quire.integrations.vllm.setup import cache_config, components, namespace, plan
from quire.keys import Namespace, PrefixKey

OPTIONS = read_options({"host_memory": "1GiB", "model_fingerprint": "w"})


@dataclass
class FullAttentionSpec:
    """As vLLM calls its own."""

    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    page_size_bytes: int = 16 * 2 * 64 * 2 * 2


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 128


class MambaSpec(FullAttentionSpec):
    """A state at a time."""


@dataclass
class Group:
    layer_names: list[str] = field(
        default_factory=lambda: [f"m.layers.{i}.attn" for i in range(12)]
    )
    kv_cache_spec: Any = field(default_factory=FullAttentionSpec)


def configs(groups: list[Any] | None = None, **parallel: int) -> tuple[Any, Any]:
    vllm = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        parallel_config=SimpleNamespace(**{"tensor_parallel_size": 1, **parallel}),
        model_config=SimpleNamespace(
            model="none", revision=None, dtype="bf16", seed=0, quantization=None,
            quantization_config=None, hf_config_path=None, hf_overrides={},
            model_class_overrides={}, max_model_len=4096,
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )  # fmt: skip
    return vllm, SimpleNamespace(num_blocks=100, kv_cache_groups=groups or [Group()])


def test_host_memory_is_shared_by_the_ranks_and_layers_come_in_order() -> None:
    one = plan(*configs([Group([f"m.layers.{i}.attn" for i in (10, 2, 0)])]), OPTIONS)
    assert one.kinds[0].layers == [[f"m.layers.{i}.attn" for i in (0, 2, 10)]]
    two = plan(*configs(tensor_parallel_size=2), OPTIONS)
    assert two.host_pages[0] == plan(*configs(), OPTIONS).host_pages[0] // 2
    assert cache_config(two, OPTIONS).num_ranks == 2


WINDOWED = Group([f"m.layers.{i}.attn" for i in (7, 1)], SlidingWindowSpec())


def test_groups_of_layers_are_a_component_for_each_kind_of_attention() -> None:
    groups = [WINDOWED, Group(["m.layers.0.attn"]), WINDOWED]
    found = plan(*configs(groups), OPTIONS)
    full, windows = found.kinds
    assert (full.groups, windows.groups) == ((1,), (0, 2))
    assert windows.layers == [["m.layers.1.attn", "m.layers.7.attn"]] * 2
    assert windows.window == 128
    kinds = components(found)
    assert [kind.name for kind in kinds] == ["full", "window"]
    assert kinds[1].pool == (100, found.host_pages[1])
    # A prompt of 4,096 tokens has 256 pages, and two windows of eight.
    assert found.host_pages[0] / found.host_pages[1] == pytest.approx(16, rel=0.01)
    used = found.host_pages[0] * full.stride + found.host_pages[1] * windows.stride
    assert OPTIONS.host_bytes * 0.99 < used <= OPTIONS.host_bytes


def test_host_memory_for_less_than_a_window_is_refused() -> None:
    little = read_options({"host_memory": "256KiB", "model_fingerprint": "w"})
    with pytest.raises(ConfigError, match="beside the windows"):
        plan(*configs([Group(), WINDOWED]), little)


@pytest.mark.parametrize(
    ("groups", "parallel", "reason"),
    [
        ([WINDOWED], {}, "one of full attention"),
        ([Group(), Group(kv_cache_spec=MambaSpec())], {}, "MambaSpec.*recurrent layers"),
        ([Group(kv_cache_spec=SimpleNamespace(block_size=16))], {}, "full attention and"),
        ([Group(), Group(kv_cache_spec=SlidingWindowSpec(32))], {}, "blocks of .16, 32."),
        (
            [Group(), WINDOWED, Group(kv_cache_spec=SlidingWindowSpec(sliding_window=64))],
            {},
            "windows: .64, 128.",
        ),
        ([Group(), Group(kv_cache_spec=FullAttentionSpec(head_size=32))], {}, "full differ"),
        # vLLM clears blocks of such models before it tells us to wait for what is copied.
        (
            [Group(), Group(kv_cache_spec=SlidingWindowSpec(dtype=torch.float8_e4m3fn))],
            {},
            "bfloat16, torch.float8_e4m3fn.*one type",
        ),
        (None, {"pipeline_parallel_size": 2}, "pipeline"),
        (None, {"decode_context_parallel_size": 2}, "context"),
    ],
)
def test_what_cannot_be_right_is_refused(
    groups: list[Any] | None, parallel: dict[str, int], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan(*configs(groups, **parallel), OPTIONS)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_an_engine_that_should_only_save_or_only_load_is_refused(role: str) -> None:
    vllm, kv = configs()
    vllm.kv_transfer_config.kv_role = role
    with pytest.raises(ConfigError, match="kv_both"):
        plan(vllm, kv, OPTIONS)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "needs host_memory"),
        ({"host_memory": "lots"}, "not a size"),
        ({"host_memory": "1GiB", "stor": "x"}, "no option stor"),
        ({"host_memory": "1GiB", "store": "nonsense"}, "nonsense"),
        ({"host_memory": "1GiB", "wait_s": 0}, "wait_s"),
    ],
)
def test_options_that_make_no_sense_say_so(given: dict[str, object], reason: str) -> None:
    with pytest.raises(QuireError, match=reason):
        read_options(given)


@pytest.mark.parametrize(
    ("config", "option", "value"),
    [
        ("model_config", "dtype", "f32"),
        ("model_config", "quantization", "fp8"),
        ("model_config", "quantization_config", {"linear": "int8"}),
        ("model_config", "hf_overrides", {"rope_theta": 1}),
        ("model_config", "model_class_overrides", {"Llama": "mine:Llama"}),
        ("cache_config", "cache_dtype", "fp8"),
        ("load_config", "load_format", "dummy"),
    ],
)
def test_engines_that_compute_something_else_share_nothing(
    config: str, option: str, value: object
) -> None:
    vllm, kv = configs()
    one = plan(vllm, kv, OPTIONS)
    before = namespace(vllm, one, OPTIONS).digest
    setattr(getattr(vllm, config), option, value)
    assert namespace(vllm, one, OPTIONS).digest != before


def test_other_weights_share_nothing_and_neither_do_those_of_another_chance() -> None:
    vllm, kv = configs()
    one = plan(vllm, kv, OPTIONS)
    other = read_options({"host_memory": "1GiB", "model_fingerprint": "v"})
    assert namespace(vllm, one, OPTIONS).digest != namespace(vllm, one, other).digest
    vllm.load_config.load_format = "dummy"
    before = namespace(vllm, one, OPTIONS).digest
    vllm.model_config.seed = 1
    assert namespace(vllm, one, OPTIONS).digest != before


BARE = read_options({"host_memory": "1GiB"})


def test_two_revisions_of_a_downloaded_model_share_nothing(
    tmp_path: Path,
) -> None:
    """As the hub's library keeps them: what `main` is says nothing of another revision."""
    repo = tmp_path / "models--some--model"
    (repo / "refs").mkdir(parents=True)
    for revision, weights in (("main", b"old"), ("v2", b"new")):
        commit = weights.hex().ljust(40, "0")
        (repo / "refs" / revision).write_text(commit)
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (snapshot / "model.safetensors").write_bytes(weights)
    vllm, kv = configs()
    vllm.model_config.model, vllm.load_config.download_dir = "some/model", str(tmp_path)
    digests = set()
    for revision in (None, "main", "v2"):
        vllm.model_config.revision = revision
        digests.add(namespace(vllm, plan(vllm, kv, BARE), BARE).digest)
    assert len(digests) == 2


@pytest.mark.parametrize("name", ["pytorch_model.bin", "notes.txt"])
def test_weights_that_cannot_be_told_apart_need_a_fingerprint(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"weights")
    vllm, kv = configs()
    vllm.model_config.model = str(tmp_path)
    with pytest.raises(ConfigError, match="give model_fingerprint"):
        namespace(vllm, plan(vllm, kv, BARE), BARE)


def test_a_model_described_elsewhere_needs_a_fingerprint() -> None:
    vllm, kv = configs()
    vllm.model_config.hf_config_path = "/elsewhere"
    with pytest.raises(ConfigError, match=r"/elsewhere.*give model_fingerprint"):
        namespace(vllm, plan(vllm, kv, BARE), BARE)


def test_a_model_whose_files_are_not_here_needs_a_fingerprint() -> None:
    vllm, kv = configs()
    with pytest.raises(ConfigError, match="give model_fingerprint"):
        namespace(vllm, plan(vllm, kv, BARE), BARE)


def feature(name: str, offset: int, length: int) -> Any:
    return SimpleNamespace(
        identifier=name, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def named(key: PrefixKey | None) -> PrefixKey:
    assert key is not None
    return key


def test_images_adapters_and_salts_name_pages() -> None:
    naming = Naming(Namespace("w", "bfloat16", 4), lambda adapter: adapter.lora_path)
    tokens = list(range(16))

    def key(**fields: Any) -> bytes:
        request = MiniRequest("r", list(tokens))
        for name, value in fields.items():
            setattr(request, name, value)
        return named(naming.key(request, 16)).page_keys()

    plain, page = key(), 32
    cat, dog = (key(mm_features=[feature(name, 5, 4)]) for name in ("cat", "dog"))
    assert cat[:page] == dog[:page] == plain[:page], "before the image nothing differs"
    assert len({cat[page : 2 * page], dog[page : 2 * page], plain[page : 2 * page]}) == 3
    shifted = key(mm_features=[feature("cat", 6, 4)])
    assert shifted[page : 2 * page] != cat[page : 2 * page]
    lora = SimpleNamespace(lora_name="a", lora_path="/a")
    assert len({plain[:page], key(lora_request=lora)[:page], key(cache_salt="s")[:page]}) == 3


def test_a_key_that_grows_is_the_key_of_all_its_tokens() -> None:
    naming = Naming(Namespace("w", "bfloat16", 4), lambda adapter: None)
    request = MiniRequest("r", list(range(30)))
    request.mm_features = [feature("cat", 3, 12)]
    whole = named(naming.key(request, 30))
    for cut in range(1, 30):
        grown = naming.longer(named(naming.key(request, cut)), request, cut, 30)
        assert grown.page_keys() == whole.page_keys()


def test_importing_quire_imports_no_integration_and_the_parts_no_vllm() -> None:
    code = (
        "import sys, quire; assert 'quire.integrations' not in sys.modules;"
        "import quire.integrations.vllm.leader;"
        "sys.exit(any(m == 'vllm' or m.startswith('vllm.') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
