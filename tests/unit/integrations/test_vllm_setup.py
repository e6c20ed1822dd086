"""What of vLLM's configuration is served, and how a request is named."""

import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mini_vllm import MiniRequest
from quire.errors import ConfigError, QuireError
from quire.integrations.vllm.naming import Naming
from quire.integrations.vllm.options import read_options
from quire.integrations.vllm.setup import cache_config, namespace, plan
from quire.keys import Namespace

OPTIONS = read_options({"host_memory": "1GiB", "model_fingerprint": "w"})


@dataclass
class Spec:
    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    page_size_bytes: int = 16 * 2 * 64 * 2 * 2


@dataclass
class Group:
    layer_names: list[str] = field(
        default_factory=lambda: [f"m.layers.{i}.attn" for i in range(12)]
    )
    kv_cache_spec: Any = field(default_factory=Spec)


def configs(groups: list[Any] | None = None, **parallel: int) -> tuple[Any, Any]:
    vllm = SimpleNamespace(
        parallel_config=SimpleNamespace(**{"tensor_parallel_size": 1, **parallel}),
        model_config=SimpleNamespace(model="none", dtype="bf16", quantization=None),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    return vllm, SimpleNamespace(num_blocks=100, kv_cache_groups=groups or [Group()])


def test_host_memory_is_shared_by_the_ranks_and_layers_come_in_order() -> None:
    one = plan(*configs([Group([f"m.layers.{i}.attn" for i in (10, 2, 0)])]), OPTIONS)
    assert one.layers == [f"m.layers.{i}.attn" for i in (0, 2, 10)]
    two = plan(*configs(tensor_parallel_size=2), OPTIONS)
    assert two.host_pages == plan(*configs(), OPTIONS).host_pages // 2
    assert cache_config(two, OPTIONS).num_ranks == 2


@pytest.mark.parametrize(
    ("groups", "parallel", "reason"),
    [
        ([Group(), Group()], {}, "2 groups"),
        ([Group(kv_cache_spec=SimpleNamespace(block_size=16))], {}, "attention is"),
        (None, {"pipeline_parallel_size": 2}, "pipeline"),
        (None, {"decode_context_parallel_size": 2}, "context"),
    ],
)
def test_what_cannot_be_right_is_refused(
    groups: list[Any] | None, parallel: dict[str, int], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan(*configs(groups, **parallel), OPTIONS)


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


def test_other_weights_dtypes_and_quantizations_share_nothing() -> None:
    vllm, kv = configs()
    one = plan(vllm, kv, OPTIONS)
    names = {namespace(vllm, one, OPTIONS).digest}
    vllm.model_config.quantization = "fp8"
    names.add(namespace(vllm, one, OPTIONS).digest)
    vllm.cache_config.cache_dtype = "fp8"
    names.add(namespace(vllm, one, OPTIONS).digest)
    other = read_options({"host_memory": "1GiB", "model_fingerprint": "v"})
    names.add(namespace(vllm, one, other).digest)
    assert len(names) == 4


def test_a_model_whose_files_are_not_here_needs_a_fingerprint() -> None:
    vllm, kv = configs()
    bare = read_options({"host_memory": "1GiB"})
    with pytest.raises(ConfigError, match="give model_fingerprint"):
        namespace(vllm, plan(vllm, kv, bare), bare)


def feature(name: str, offset: int, length: int) -> Any:
    return SimpleNamespace(
        identifier=name, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def test_images_adapters_and_salts_name_pages() -> None:
    naming = Naming(Namespace("w", "bfloat16", 4))
    tokens = list(range(16))

    def key(**fields: Any) -> bytes:
        request = MiniRequest("r", list(tokens))
        for name, value in fields.items():
            setattr(request, name, value)
        return naming.key(request, 16).page_keys()

    plain, page = key(), 32
    cat, dog = (key(mm_features=[feature(name, 5, 4)]) for name in ("cat", "dog"))
    assert cat[:page] == dog[:page] == plain[:page], "before the image nothing differs"
    assert len({cat[page : 2 * page], dog[page : 2 * page], plain[page : 2 * page]}) == 3
    shifted = key(mm_features=[feature("cat", 6, 4)])
    assert shifted[page : 2 * page] != cat[page : 2 * page]
    lora = SimpleNamespace(lora_name="a", lora_path="/a")
    assert len({plain[:page], key(lora_request=lora)[:page], key(cache_salt="s")[:page]}) == 3


def test_a_key_that_grows_is_the_key_of_all_its_tokens() -> None:
    naming = Naming(Namespace("w", "bfloat16", 4))
    request = MiniRequest("r", list(range(30)))
    request.mm_features = [feature("cat", 3, 12)]
    whole = naming.key(request, 30)
    for cut in range(1, 30):
        grown = naming.longer(naming.key(request, cut), request, cut, 30)
        assert grown.page_keys() == whole.page_keys()


def test_importing_quire_imports_no_integration_and_the_parts_no_vllm() -> None:
    code = (
        "import sys, quire; assert 'quire.integrations' not in sys.modules;"
        "import quire.integrations.vllm.leader;"
        "sys.exit(any(m == 'vllm' or m.startswith('vllm.') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
