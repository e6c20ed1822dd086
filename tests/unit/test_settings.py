"""Settings: every source, in order, and a sentence for everything that can be written wrongly."""

import dataclasses
import os
from pathlib import Path

import pytest

from quire.config import PrefetchPolicy, WritePolicy
from quire.errors import ConfigError, MemoryBudgetError
from quire.settings import (
    OPTIONS,
    Machine,
    Settings,
    Source,
    check,
    effective,
    engine_config,
    load,
    make_cache_dir,
    probe,
    served_name,
)
from quire.settings.machine import cuda_device_bytes
from quire.settings.reference import markdown
from quire.store import open_store

ROOT = Path(__file__).parents[2]
MIB, GIB = 1 << 20, 1 << 30
SECRET = "a secret of some length"
LAPTOP = Machine(16 * GIB, Path("/home/ada/.cache/quire"), 100 * GIB)
GPU_BOX = Machine(128 * GIB, Path("/home/ada/.cache/quire"), 900 * GIB, gpus=(100 * GIB, 90 * GIB))


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "quire.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def complaint(flags=None, environ=None, config=None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flags or {}, environ or {}, config)
    return str(caught.value)


def contradiction(machine=LAPTOP, **environ: str) -> str:
    loaded = load({}, {f"QUIRE_{name.upper()}": value for name, value in environ.items()})
    with pytest.raises(ConfigError) as caught:
        check(loaded, effective(loaded.settings, machine), machine)
    return str(caught.value)


# ---- where values come from ----------------------------------------------------------------------


def test_nothing_given_is_all_defaults():
    loaded = load({}, {})
    assert loaded.settings == Settings()
    assert {origin.source for origin in loaded.origins.values()} == {Source.DEFAULT}
    assert loaded.warnings == ()


def test_each_source_overrides_the_one_before_and_is_remembered(tmp_path):
    path = write(tmp_path, "page_size = 1\ntp = 2\nport = 3\n")
    environ = {"QUIRE_TP": "4", "QUIRE_PORT": "5"}
    loaded = load({"port": "6", "host": None}, environ, path)
    settings = loaded.settings
    assert (settings.page_size, settings.tp, settings.port) == (1, 4, 6)
    assert loaded.origins["host"].source is Source.DEFAULT
    assert [loaded.origins[name].where for name in ("page_size", "tp", "port")] == [
        f"{path}: page_size",
        "QUIRE_TP",
        "--port",
    ]


def test_the_file_is_the_one_of_the_flag_else_of_the_environment(tmp_path):
    ours = write(tmp_path, "port = 1")
    (tmp_path / "other.toml").write_text("port = 2")
    environ = {"QUIRE_CONFIG": str(tmp_path / "other.toml")}
    assert load({}, environ).settings.port == 2
    assert load({}, environ, ours).settings.port == 1


def test_every_kind_of_value_from_a_file(tmp_path):
    path = write(
        tmp_path,
        """
        model = "/models/m"
        device = "auto"
        device_memory = "1.5GiB"
        host_memory = 0
        store = "none"
        write_policy = "write_through"
        prefetch_policy = "best_effort"
        request_timeout = 12
        debug = true
        threads = "auto"
        """,
    )
    settings = load({}, {}, path).settings
    assert settings.device is None
    assert settings.threads is None
    assert (settings.device_memory, settings.host_memory) == (3 * GIB // 2, 0)
    assert (settings.store, settings.debug) == ("none", True)
    assert settings.prefetch_policy is PrefetchPolicy.BEST_EFFORT
    assert settings.request_timeout == 12.0


@pytest.mark.parametrize("name", OPTIONS)
def test_the_example_of_every_option_can_be_given(name):
    option = OPTIONS[name]
    from_environment = load({}, {option.variable: option.example})
    assert from_environment.origins[name].is_given
    assert getattr(from_environment.settings, name) != getattr(Settings(), name)
    if option.flag:
        from_flag = load({name: option.example}, {})
        assert from_flag.settings == from_environment.settings


def test_every_option_has_words_for_people():
    for field in dataclasses.fields(Settings):
        option = OPTIONS[field.name]
        assert option.help.endswith(".")
        assert option.kind.metavar
        assert (option.auto is not None) == (option.default is None and not option.is_secret)


# ---- what can be written wrongly -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("pagesize = 16", "'pagesize' is not an option: did you mean page_size?"),
        ("page-size = 16", "did you mean page_size?"),
        ("zzz = 16", "'zzz' is not an option: `quire config` lists all options"),
        ("[server]\nport = 1", "[server] is a table"),
        ("port = ", "is not TOML"),
        ('port = "8000"', "port is '8000': write a whole number without quotes"),
        ("port = 70000", "port is '70000': give a whole number from 0 to 65535"),
        ("port = true", "write a whole number without quotes"),
        ("model = 7", "write it as text in quotes"),
        ('model = ""', "model is empty: give it a value or remove the line"),
        ("host_memory = 1.5", "write a size in quotes"),
        ("host_memory = true", "write a size in quotes"),
        ("device_memory = 0", "give at least 1 B"),
        ('debug = "yes"', "write true or false without quotes"),
        ('request_timeout = "1"', "write a number of seconds without quotes"),
        ("request_timeout = 0", "a number of seconds above 0"),
        ('device = "tpu"', "device is 'tpu': use auto, cpu or cuda"),
        ('write_policy = "never"', "use write_through, write_through_selective or write_back"),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_it(tmp_path, line, wanted):
    path = write(tmp_path, line)
    sentence = complaint(config=path)
    assert str(path) in sentence
    assert wanted in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        ("PORT", "http", "give a whole number from 0 to 65535, such as 8000"),
        ("PAGE_SIZE", "0", "give a whole number from 1 to 4096"),
        ("HOST_MEMORY", "lots", "such as 20GiB"),
        ("HOST_MEMORY", "-1GiB", "such as 20GiB"),
        ("STORE", "/var/cache", "such as file:///var/cache/quire, or none for no store"),
        ("REQUEST_TIMEOUT", "nan", "a number of seconds above 0"),
        ("DEBUG", "maybe", "use true or false"),
        ("MAX_RUNNING", "", "is empty: give it a value or do not set it"),
        ("MODEL", "a\nb", "write it on one line"),
    ],
)
def test_a_wrong_variable_is_one_sentence_that_names_it(name, text, fix):
    sentence = complaint(environ={f"QUIRE_{name}": text})
    assert f"QUIRE_{name}" in sentence
    assert name.lower() in sentence
    assert fix in sentence


def test_a_wrong_flag_is_one_sentence_that_names_it():
    sentence = complaint({"host_memory": "big"})
    assert sentence == (
        "host_memory: --host-memory is 'big': write a number and a unit, such as 20GiB"
    )


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    assert "check --config and QUIRE_CONFIG" in complaint(config=tmp_path / "none.toml")
    assert "Is a directory" in complaint(environ={"QUIRE_CONFIG": str(tmp_path)})


def test_an_unknown_variable_of_ours_is_a_warning():
    (warning,) = load({}, {"QUIRE_PAGESIZE": "16", "QUIRE_CACHE_DIR": "/x"}).warnings
    assert "QUIRE_PAGESIZE is set and means nothing to Quire: did you mean QUIRE_PAGE_SIZE?" in (
        warning
    )


# ---- keys ----------------------------------------------------------------------------------------


def test_keys_have_no_flag_and_are_never_shown(tmp_path):
    for name in ("api_key", "admin_key", "peer_secret"):
        assert OPTIONS[name].flag is None
        assert OPTIONS[name].show("hunter2") == "set (hidden)"
        assert OPTIONS[name].show(None) == "not set"
    assert "hunter" not in complaint(environ={"QUIRE_API_KEY": "hunter\n2"})


def test_a_file_with_keys_that_others_can_read_is_a_warning(tmp_path):
    text = 'api_key = "a"\nadmin_key = "b"\n'
    assert load({}, {}, write(tmp_path, text, 0o600)).warnings == ()
    path = write(tmp_path, text, 0o640)
    (warning,) = load({}, {}, path).warnings
    assert "holds api_key and admin_key and can be read by others" in warning
    assert f"chmod 600 {path}" in warning
    assert load({}, {}, write(tmp_path, "port = 1", 0o644)).warnings == ()


def test_a_store_is_shown_without_its_password():
    show = OPTIONS["store"].show
    assert show("redis://ada:s3cret@host:6379/0") == "redis://***@host:6379/0"
    assert show("redis://:s3:c@ret@host/0?a=b") == "redis://***@host/0?a=b"
    assert show("file:///a@b:c@d") == "file:///a@b:c@d"


# ---- contradictions ------------------------------------------------------------------------------


def test_a_store_without_host_memory_contradicts_only_if_it_was_asked_for():
    sentence = contradiction(host_memory="0", store="file:///x")
    assert "store (QUIRE_STORE)" in sentence
    assert "host_memory (QUIRE_HOST_MEMORY) is 0" in sentence
    assert "give host_memory a size, or set store to none" in sentence
    loaded = load({}, {"QUIRE_HOST_MEMORY": "0"})
    settings = effective(loaded.settings, LAPTOP)
    assert settings.store == "none"
    assert check(loaded, settings, LAPTOP) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("write_policy", "write_back"),
        ("prefetch_policy", "best_effort"),
        ("prefetch_threshold", "128"),
    ],
)
def test_a_policy_for_a_tier_that_is_off_contradicts(name, value):
    sentence = contradiction(host_memory="0", **{name: value})
    assert f"{name} (QUIRE_{name.upper()})" in sentence
    assert f"drop {name}" in sentence


def test_a_device_that_is_not_there_contradicts():
    assert "torch can use no GPU here: use cpu" in contradiction(device="cuda")
    assert "set tp to at most 2" in contradiction(GPU_BOX, device="cuda", tp="3")


def test_more_memory_than_there_is_contradicts():
    loaded = load({"host_memory": "15.5GiB"}, {})
    with pytest.raises(MemoryBudgetError) as caught:
        check(loaded, effective(loaded.settings, LAPTOP), LAPTOP)
    assert str(caught.value) == (
        "host_memory (--host-memory) for 15.5 GiB and device_memory for 1 GiB ask for more than "
        "the 16 GiB available (this machine's memory): lower what is larger"
    )
    on_gpu = load({"device_memory": "170GiB"}, {})  # of the GPUs, not of this
    assert check(on_gpu, effective(on_gpu.settings, GPU_BOX), GPU_BOX) == []


def test_several_stores_are_urls_with_blanks_between_them():
    text = " redis://u:pw@cache  file:///mnt/pages?write=back "
    settings = load({"store": text}, {}).settings
    assert settings.store == "redis://u:pw@cache file:///mnt/pages?write=back"
    assert OPTIONS["store"].show(settings.store) == (
        "redis://***@cache file:///mnt/pages?write=back"
    )
    assert "not a store URL" in complaint({"store": "memory:// nothing"})
    assert "there are no 'fil' stores" in contradiction(store="memory:// fil:///x")


def test_a_store_of_an_unknown_scheme_contradicts():
    assert "there are no 'fil' stores: known are" in contradiction(store="fil:///x")


def test_one_key_for_clients_and_administrators_contradicts():
    sentence = contradiction(api_key="same", admin_key="same")
    assert "give two different keys" in sentence
    assert "'same'" not in sentence


def test_what_is_allowed_but_unwise_is_a_warning():
    loaded = load({"dtype": "bfloat16"}, {})
    (slow,) = check(loaded, effective(loaded.settings, LAPTOP), LAPTOP)
    assert "slower than float32" in slow


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"role": "decode"}, "role (QUIRE_ROLE) is decode, and peer_secret is not set"),
        ({"role": "prefill"}, "the same long random text, as QUIRE_PEER_SECRET"),
        ({"role": "prefill", "peer_secret": "hunter2"}, "has 7 characters, and must have at least"),
        ({"peers": "tcp://a:1"}, "peers (QUIRE_PEERS) is set, and peer_secret is not set"),
        ({"peer_port": "7000"}, "peer_port (QUIRE_PEER_PORT) is set, and peer_secret is not set"),
        (
            {"role": "decode", "peer_secret": SECRET, "host_memory": "0"},
            "host_memory (QUIRE_HOST_MEMORY) is 0: give host_memory a size",
        ),
        ({"prefill": "tcp://a:1"}, "role is unified: set role to decode, or drop prefill"),
        (
            {"role": "prefill", "peer_secret": SECRET, "prefill": "tcp://a:1"},
            "role (QUIRE_ROLE) is prefill: set role to decode",
        ),
        ({"decode_cache": "false"}, "set role to decode, or drop decode_cache"),
        (
            {
                "role": "decode",
                "peer_secret": SECRET,
                "decode_cache": "false",
                "decode_restore": "true",
            },
            "nothing is looked for in the own tiers: drop one of them",
        ),
        (
            {"role": "decode", "peer_secret": SECRET, "peer_port": "65535"},
            "choose a lower one",
        ),
    ],
)
def test_a_role_that_cannot_be_had_contradicts(environ, wanted):
    sentence = contradiction(**environ)
    assert wanted in sentence
    assert "'s'" not in sentence


@pytest.mark.parametrize(
    "environ",
    [
        {"role": "prefill"},
        {"role": "decode"},
        {"role": "decode", "prefill": "tcp://a:1,tcp://b:2", "decode_restore": "false"},
        {"peers": "tcp://a:1"},
        {},
    ],
)
def test_roles_that_can_be_had(environ):
    variables = {f"QUIRE_{name.upper()}": value for name, value in environ.items()}
    loaded = load({}, variables | {"QUIRE_PEER_SECRET": SECRET})
    settings = effective(loaded.settings, LAPTOP)
    assert check(loaded, settings, LAPTOP) == []
    config = engine_config(settings, LAPTOP, Path("/m"), "m")
    assert config.role.value == environ.get("role", "unified")
    assert config.peer_port == (0 if environ else None)  # any free one, where one is needed
    assert config.peer_secret == SECRET
    assert config.prefill == [*settings.prefill]


def test_a_peer_port_that_is_given_is_the_one():
    loaded = load({"role": "decode", "peer_port": "7000"}, {"QUIRE_PEER_SECRET": SECRET})
    assert effective(loaded.settings, LAPTOP).peer_port == 7000


# ---- addresses -----------------------------------------------------------------------------------


def test_addresses_from_every_source(tmp_path):
    wanted = ("tcp://10.0.0.5:7000", "tcp://[::1]:1")
    text = "tcp://10.0.0.5:7000, tcp://[::1]:1"
    assert load({"peers": text}, {}).settings.peers == wanted
    assert load({}, {"QUIRE_PEERS": text}).settings.peers == wanted
    path = write(tmp_path, f'peers = "{text}"\nprefill = ["tcp://a:1", "tcp://B:2"]')
    settings = load({}, {}, path).settings
    assert (settings.peers, settings.prefill) == (wanted, ("tcp://a:1", "tcp://b:2"))
    assert load({}, {}, write(tmp_path, "peers = []")).settings.peers == ()
    assert load({"peers": "none"}, {}).settings.peers == ()
    kind = OPTIONS["peers"].kind
    assert (kind.show(wanted), kind.show(())) == ("tcp://10.0.0.5:7000,tcp://[::1]:1", "none")
    assert kind.plain(wanted) == [*wanted]


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.5:7000",
        "http://a:1",
        "tcp://a",
        "tcp://a:0",
        "tcp://a:99999",
        "tcp://a:1/x",
        "tcp://u:p@a:1",
        "tcp://a:1,",
        "tcp://a:1,tcp://a:1",
        "tcp://a b:1",
    ],
)
def test_a_wrong_address_is_one_sentence(text):
    sentence = complaint({"prefill": text})
    assert "--prefill" in sentence
    assert "tcp://host:port" in sentence or "give each address once" in sentence


def test_an_address_in_a_file_is_text(tmp_path):
    path = write(tmp_path, "prefill = 7")
    assert "write a list of addresses" in complaint(config=path)


def test_names_from_every_source(tmp_path):
    wanted = ("small", "default")
    assert (
        load({"served_model_name": "small, default,small"}, {}).settings.served_model_name == wanted
    )
    path = write(tmp_path, 'served_model_name = ["small", "default"]')
    assert load({}, {}, path).settings.served_model_name == wanted
    for wrong in ("[]", '["a", ""]', "[1]"):
        path = write(tmp_path, f"served_model_name = {wrong}")
        assert "such as" in complaint(config=path)


# ---- what auto comes to --------------------------------------------------------------------------


def test_auto_on_a_cpu():
    settings = effective(Settings(), LAPTOP)
    assert (settings.device, settings.dtype) == ("cpu", "float32")
    assert (settings.device_memory, settings.host_memory) == (GIB, 2 * GIB)
    assert settings.store == "file:///home/ada/.cache/quire/store?max=10GiB"


def test_auto_on_a_small_machine_takes_a_share():
    small = Machine(800 * MIB, Path("/c"), 2 * GIB)
    settings = effective(Settings(), small)
    assert (settings.device_memory, settings.host_memory) == (100 * MIB, 200 * MIB)
    assert settings.store == "file:///c/store?max=512MiB"


def test_auto_on_a_full_disk_is_no_store_and_a_warning():
    full = dataclasses.replace(LAPTOP, free_disk_bytes=MIB)
    loaded = load({}, {})
    settings = effective(loaded.settings, full)
    assert settings.store == "none"
    assert "free some space" in check(loaded, settings, full)[0]


def test_auto_on_a_gpu():
    settings = effective(Settings(), GPU_BOX)
    assert (settings.device, settings.dtype) == ("cuda", "bfloat16")
    assert settings.device_memory is None  # until the weights are known
    assert settings.host_memory == 32 * GIB
    assert settings.decode_computes == 1024


def test_what_is_given_is_left_alone():
    sizes = {"device_memory": 5, "host_memory": 7, "decode_computes": 9}
    given = Settings(device="cpu", dtype="float16", store="none", **sizes)
    assert effective(given, GPU_BOX) == given


def test_the_default_store_can_be_opened(tmp_path):
    machine = dataclasses.replace(LAPTOP, cache_dir=tmp_path / "a b")
    url = effective(Settings(), machine).store
    make_cache_dir(machine)
    make_cache_dir(machine)
    store = open_store(url)
    store.close()
    assert (tmp_path / "a b" / "store").is_dir()


def test_a_cache_directory_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    machine = dataclasses.replace(LAPTOP, cache_dir=tmp_path / "file" / "quire")
    with pytest.raises(ConfigError, match="set QUIRE_CACHE_DIR to a directory"):
        make_cache_dir(machine)


def test_this_machine_can_be_looked_at(monkeypatch, tmp_path):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "not" / "yet"))
    machine = probe()
    assert machine.available_bytes > 0
    assert machine.cache_dir == tmp_path / "not" / "yet"
    assert 0 < machine.free_disk_bytes <= os.statvfs(tmp_path).f_blocks * (1 << 20)
    assert list(tmp_path.iterdir()) == []


# ---- what an engine is started with --------------------------------------------------------------


def model_of(folder: Path, num_parameters: int) -> Path:
    import torch
    from safetensors.torch import save_file

    weights = {"w": torch.zeros(num_parameters, dtype=torch.bfloat16)}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_an_engine_gets_what_was_set():
    environ = {"QUIRE_MAX_CONTEXT": "100", "QUIRE_THREADS": "3", "QUIRE_WRITE_POLICY": "write_back"}
    settings = effective(load({"tp": "2"}, environ).settings, LAPTOP)
    config = engine_config(settings, LAPTOP, Path("/m"), "m")
    assert (config.device_bytes, config.host_bytes, config.store) == (
        GIB,
        2 * GIB,
        settings.store,
    )
    assert (config.model, config.name, config.tp) == ("/m", "m", 2)
    assert (config.max_context, config.threads) == (100, 3)
    assert config.write_policy is WritePolicy.WRITE_BACK


def test_no_store_is_none_for_the_engine():
    settings = effective(Settings(store="none"), LAPTOP)
    assert engine_config(settings, LAPTOP, Path("/m"), "m").store is None


def test_on_a_gpu_the_weights_leave_the_rest(tmp_path):
    directory = model_of(tmp_path, 1000)
    settings = effective(Settings(tp=2), GPU_BOX)
    config = engine_config(settings, GPU_BOX, directory, "m")
    assert config.device_bytes == cuda_device_bytes(90 * GIB, 2000, 2)
    assert config.device_bytes == int((180 * GIB - 2000) * 0.8)
    tiny = dataclasses.replace(GPU_BOX, gpus=(1500,))
    with pytest.raises(MemoryBudgetError, match="use a smaller model"):
        engine_config(effective(Settings(), tiny), tiny, directory, "m")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (None, "SmolLM2-135M-Instruct"),
        ("/models/llama-3.1-8b/", "llama-3.1-8b"),
        ("/models/Tiny.Q4.gguf", "Tiny.Q4"),
    ],
)
def test_what_clients_call_the_model(model, name):
    assert served_name(model) == name


# ---- the reference -------------------------------------------------------------------------------


def test_the_document_is_what_the_code_says():
    text = (ROOT / "docs/configuration.md").read_text()
    assert text == markdown() + "\n", "run: quire config --reference > docs/configuration.md"


def test_the_reference_names_every_option_once():
    rows = [line for line in markdown().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(OPTIONS)
    for row, option in zip(rows, OPTIONS.values(), strict=True):
        assert f"`{option.variable}`" in row
        assert option.flag is None or f"`{option.flag}`" in row
