"""Settings: every option of a server, with its default and its meaning, in one frozen object.

This file is the only list of options there is: the command line's flags, the names of environment
variables, the keys of the file and docs/configuration.md all follow from it. `None` stands for
"auto"; what that comes to on a machine is decided in machine.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from quire.config import PrefetchPolicy, WritePolicy
from quire.engine.config import AttentionKind, ForwardKind, Role
from quire.engine.draft.kinds import MAX_DRAFT_TOKENS, DraftKind
from quire.peer.kinds import TransportKind
from quire.settings.values import (
    AUTO,
    DraftText,
    Integer,
    NameList,
    OneOf,
    PeerList,
    PlainText,
    Seconds,
    Size,
    StoreText,
    Switch,
    Value,
    ValueKind,
)
from quire.transfer.kinds import MoverKind

PREFIX = "QUIRE_"


@dataclass(frozen=True, slots=True)
class Option:
    """What is known of one option."""

    name: str
    kind: ValueKind
    default: Value
    help: str
    example: str
    """As it is written on a command line."""
    auto: str | None = None
    """What "auto", the default, means; None: there is no auto."""
    has_flag: bool = False
    is_secret: bool = False
    """Not to be shown, and no flag: everybody on the machine can read a process's arguments."""

    @property
    def flag(self) -> str | None:
        return f"--{self.name.replace('_', '-')}" if self.has_flag else None

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def show(self, value: Value) -> str:
        if self.is_secret:
            return "not set" if value is None else "set (hidden)"
        if value is None:
            return f"{AUTO}: {self.auto}" if self.auto else "not set"
        return self.kind.show(value)


def _option(
    default: Value,
    kind: ValueKind,
    help: str,
    *,
    example: str,
    auto: str | None = None,
    flag: bool = False,
    secret: bool = False,
) -> Any:
    about = {"kind": kind, "help": help, "example": example, "auto": auto}
    return field(default=default, metadata={**about, "has_flag": flag, "is_secret": secret})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    model: str | None = _option(
        None,
        PlainText("DIR|FILE|ID"),
        "The model: a directory as transformers saves it, a GGUF file, or an id on the hub.",
        auto="SmolLM2-135M-Instruct, which comes with Quire",
        example="/models/llama-3.1-8b",
        flag=True,
    )
    device: str | None = _option(
        None,
        OneOf([AUTO, "cpu", "cuda"]),
        "Where the model runs.",
        auto="cuda if torch can use one, else cpu",
        example="cuda",
        flag=True,
    )
    dtype: str | None = _option(
        None,
        OneOf([AUTO, "float32", "bfloat16", "float16"]),
        "Of weights and KV cache.",
        auto="float32 on a CPU, bfloat16 on CUDA",
        example="bfloat16",
        flag=True,
    )
    forward: ForwardKind = _option(  # noqa: RUF009  # it is a dataclasses.field
        ForwardKind.AUTO,
        OneOf(list(ForwardKind)),
        "What computes the model. dense: Quire's own decoder, for Llama, Mistral, Qwen2, Qwen3 and "
        "Gemma 3. transformers: that library's modules, for all models. auto: dense where it can.",
        example="transformers",
        flag=True,
    )
    attention: AttentionKind = _option(  # noqa: RUF009
        AttentionKind.AUTO,
        OneOf(list(AttentionKind)),
        "What computes attention. triton: Quire's own kernels, for CUDA. torch: that library's, "
        "everywhere. auto: triton where it can.",
        example="torch",
        flag=True,
    )
    cuda_graphs: bool = _option(
        True,
        Switch(),
        "On CUDA, with one rank: replay steps that decode, and the ends of prompts whose pages are "
        "on the device, as CUDA graphs, captured at start; for models of transformers where their "
        "code allows it.",
        example="false",
        flag=True,
    )
    copies: MoverKind = _option(  # noqa: RUF009
        MoverKind.AUTO,
        OneOf(list(MoverKind)),
        "What moves pages between a CUDA device and the host. rectangles, pieces: the device's "
        "copy engines, page by page or layer by layer; staged: by way of a buffer on the device. "
        "kernel: one of Quire's own. index: torch. "
        "auto: as measured at start.",
        example="rectangles",
    )
    page_size: int = _option(
        16,
        Integer(1, 4096, example=16),
        "Tokens per page, the unit in which everything is cached. Servers that share a store "
        "need the same.",
        example="64",
        flag=True,
    )
    device_memory: int | None = _option(
        None,
        Size(minimum=1),
        "For pages on the device (L1), all ranks together.",
        auto="on a CPU 1/8 of the available memory, at most 1 GiB; on CUDA what the weights and "
        "the largest batch, tried at start, leave free, or with several ranks, windows or "
        "recurrent layers 80 % of what the weights do",
        example="20GiB",
        flag=True,
    )
    host_memory: int | None = _option(
        None,
        Size(),
        "For pages in host memory (L2), all ranks together. 0 switches L2 off, and with it the "
        "store, which is reached through it.",
        auto="1/4 of the available memory, at most 2 GiB on a CPU and 32 GiB on CUDA",
        example="64GiB",
        flag=True,
    )
    store: str | None = _option(
        None,
        StoreText(),
        "Where pages are kept for good and shared with other servers (L3), or none.",
        auto="files in Quire's cache directory, 1/4 of the free disk, at most 10 GiB",
        example="file:///mnt/nvme/quire?max=200GiB",
        flag=True,
    )
    write_policy: WritePolicy = _option(  # noqa: RUF009  # it is a dataclasses.field
        WritePolicy.WRITE_THROUGH,
        OneOf(list(WritePolicy)),
        "When computed pages are copied to host and store: at once, when they have been reused, "
        "or when the device runs short.",
        example="write_back",
        flag=True,
    )
    prefetch_policy: PrefetchPolicy = _option(  # noqa: RUF009
        PrefetchPolicy.TIMEOUT,
        OneOf(list(PrefetchPolicy)),
        "How long a request waits for pages from the store: not at all, until all have arrived, "
        "or for a time that grows with their number.",
        example="wait_complete",
        flag=True,
    )
    tp: int = _option(
        1,
        Integer(1, 64, example=2),
        "Tensor-parallel ranks: processes, and on CUDA devices, that share the model.",
        example="2",
        flag=True,
    )
    host: str = _option(
        "127.0.0.1",
        PlainText("ADDRESS"),
        "Address to listen on; 0.0.0.0 for all of this machine's.",
        example="0.0.0.0",
        flag=True,
    )
    port: int = _option(
        8000,
        Integer(0, 65535, example=8000),
        "Port to listen on; 0 for any that is free.",
        example="8080",
        flag=True,
    )
    api_key: str | None = _option(
        None,
        PlainText("KEY"),
        "Clients must send this key. Not set: they need none.",
        example="a long random text",
        secret=True,
    )
    tenant_keys: str | None = _option(
        None,
        PlainText("FILE"),
        "API keys of tenants, a name and a key in each line. What they cache is their own, and "
        "counts for tenant_share and tenant_requests.",
        auto="no tenant has a key",
        example="/etc/quire/tenants",
    )
    admin_key: str | None = _option(
        None,
        PlainText("KEY"),
        "Needed for the admin API (flush, attach, detach, …), wherever a request comes from. Not "
        "set: one is made at every start and written to admin_key_file.",
        example="another long random text",
        secret=True,
    )
    admin_key_file: str | None = _option(
        None,
        PlainText("FILE"),
        "Where an admin key made at the start is written, for this user alone; removed at the end.",
        auto="admin/PORT in Quire's cache directory",
        example="/run/quire/admin.key",
    )
    served_model_name: tuple[str, ...] | None = _option(
        None,
        NameList(),
        "What requests may call the model, instead of its own name; several with commas.",
        auto="the name of its directory or file",
        example="small,default",
        flag=True,
    )
    tool_parser: str = _option(
        AUTO,
        PlainText("NAME|auto|none"),
        "How calls are read from answers: functiongemma, gemma4, harmony, hermes, json, llama3, "
        "mistral, mistral-args, qwen-xml, tool_code, or another that is installed. auto: by the "
        "model's template. none: they stay text.",
        example="hermes",
        flag=True,
    )
    reasoning_parser: str = _option(
        AUTO,
        OneOf([AUTO, "think", "none"]),
        "Whether `<think>…</think>` is told apart from the answer. auto: if the model's template "
        "or vocabulary knows it.",
        example="none",
        flag=True,
    )
    sampling_defaults: str = _option(
        "model",
        OneOf(["model", "openai"]),
        "What holds for what a request does not say: the model's generation_config.json, or "
        "OpenAI's temperature 1 and top_p 1.",
        example="openai",
    )
    strict: bool = _option(
        False,
        Switch(),
        "Fields of a request that nobody knows are answered with 400 instead of ignored.",
        example="true",
        flag=True,
    )
    log_requests: bool = _option(
        False,
        Switch(),
        "Log one line for every answer: its tokens, where they were found, how long it took.",
        example="true",
        flag=True,
    )
    otlp: str | None = _option(
        None,
        PlainText("URL"),
        "Send a span for every request, answer and hand-over to this OpenTelemetry collector (OTLP "
        "over HTTP).",
        auto="nobody is told",
        example="http://127.0.0.1:4318",
        flag=True,
    )
    record: str | None = _option(
        None,
        PlainText("FILE"),
        "Record a trace of the requests for `quire replay`: lengths and keyed digests of blocks, "
        "never tokens. A new file.",
        auto="requests are not recorded",
        example="requests.jsonl",
        flag=True,
    )
    record_max: int = _option(
        256 << 20,
        Size(minimum=1),
        "Recording ends when the file has this size.",
        example="1GiB",
    )
    speculate: str = _option(
        DraftKind.OFF.value,
        DraftText(),
        "Propose tokens ahead, so that one step checks several; answers stay the same. ngram: "
        "looked up in the request's own text. eagle: by a draft head made for the model, the one "
        "that comes with it or the one in DIR. eagle-tree, eagle-tree:DIR: with the second best "
        "beside each token.",
        example="ngram",
        flag=True,
    )
    draft_tokens: int = _option(
        4,
        Integer(1, MAX_DRAFT_TOKENS, example=4),
        "Tokens proposed together for one request, at most; fewer, or none, where that is faster.",
        example="3",
        flag=True,
    )
    role: Role = _option(  # noqa: RUF009  # it is a dataclasses.field
        Role.UNIFIED,
        OneOf(list(Role)),
        "What this server does of a request: all of it, only computing prompts for decode servers, "
        "or only generating, from prompts that prefill servers computed.",
        example="decode",
        flag=True,
    )
    prefill: tuple[str, ...] = _option(
        (),
        PeerList(),
        "Role decode: page servers of the prefill servers to ask, in this order. A router names "
        "them with each request instead.",
        example="tcp://10.0.0.5:7000,tcp://10.0.0.6:7000",
        flag=True,
    )
    peers: tuple[str, ...] = _option(
        (),
        PeerList(),
        "Page servers of other engines whose cached pages may be used.",
        example="tcp://10.0.0.7:7000",
        flag=True,
    )
    peer_host: str = _option(
        "127.0.0.1",
        PlainText("ADDRESS"),
        "Where the page server listens, which other engines fetch pages from.",
        example="10.0.0.5",
        flag=True,
    )
    peer_port: int | None = _option(
        None,
        Integer(0, 65535, example=7000),
        "Port on which other engines reach this one; 0 for any that is free. The ranks' page "
        "servers take the ports after it, one each.",
        auto="any free one for the roles prefill and decode and where peers is set, else there is "
        "no page server",
        example="7000",
        flag=True,
    )
    peer_secret: str | None = _option(
        None,
        PlainText("KEY"),
        "Shared by all engines that exchange pages; nobody else is served.",
        example="a third long random text",
        secret=True,
    )
    peer_transport: TransportKind = _option(  # noqa: RUF009
        TransportKind.AUTO,
        OneOf(list(TransportKind)),
        "How pages come from other engines: shm through memory shared on one machine, tcp over the "
        "network; auto takes the first where it can be had. nixl: by RDMA or what NIXL finds, "
        "unencrypted, if all have it.",
        example="tcp",
        flag=True,
    )
    decode_cache: bool = _option(
        True,
        Switch(),
        "Role decode: look for prefixes in the own tiers before asking a prefill server.",
        example="false",
    )
    decode_restore: bool = _option(
        True,
        Switch(),
        "Role decode: look for them in host memory and store too, not only on the device.",
        example="false",
    )
    decode_computes: int | None = _option(
        None,
        Integer(0, example=1024),
        "Role decode: a prompt that lacks at most so many tokens is computed here: that is sooner "
        "done than handed over.",
        auto="1024 on a GPU, 0 on a CPU",
        example="0",
    )
    handover_timeout: float = _option(
        30.0,
        Seconds(),
        "A hand-over that makes no progress for so long is given up and tried elsewhere.",
        example="10",
    )
    router: str | None = _option(
        None,
        PlainText("URL"),
        "Routers that this server comes to by itself, and leaves; several with commas. They know "
        "it by the admin key.",
        auto="routers are told of it",
        example="http://10.0.0.1:8000",
        flag=True,
    )
    kv_events: str | None = _option(
        None,
        PlainText("ADDRESS"),
        "Publish what the cache holds, in vLLM's format over ZeroMQ, for routers that read it.",
        auto="nothing is published",
        example="tcp://*:5557",
        flag=True,
    )
    kv_events_replay: str | None = _option(
        None,
        PlainText("ADDRESS"),
        "Where those who missed events of kv_events ask for them again.",
        auto="they cannot",
        example="tcp://*:5558",
    )
    kv_events_topic: str = _option(
        "",
        PlainText("TOPIC"),
        "What each message of kv_events begins with.",
        example="kv@10.0.0.5@llama",
    )
    max_context: int | None = _option(
        None,
        Integer(1, example=8192),
        "Tokens of prompt and answer together.",
        auto="what the model was made for",
        example="8192",
    )
    max_running: int = _option(
        32, Integer(1, example=32), "Requests computed together.", example="64"
    )
    max_waiting: int = _option(
        256, Integer(0, example=256), "Requests queued; more are turned away.", example="1000"
    )
    tenant_share: int = _option(
        100,
        Integer(1, 100, example=50),
        "Per cent of each tier that one tenant (by its key or `cache_salt`) may have cached.",
        example="50",
    )
    tenant_requests: int = _option(
        0,
        Integer(0, example=8),
        "Requests of one tenant in flight; more are turned away. 0: any number.",
        example="8",
    )
    chunk_tokens: int = _option(
        512,
        Integer(1, example=512),
        "Prompt tokens computed in one step, over all requests: more is faster in all, less "
        "disturbs the others less.",
        example="2048",
    )
    threads: int | None = _option(
        None,
        Integer(1, example=8),
        "CPU threads for the model, of each rank.",
        auto="the cores there are, shared among ranks",
        example="8",
    )
    request_timeout: float = _option(
        600.0, Seconds(), "A request that takes longer is ended.", example="120"
    )
    drain_timeout: float = _option(
        600.0,
        Seconds(),
        "Told to stop by SIGTERM, a server takes nothing new and finishes what runs; what is not "
        "finished after so long is cut.",
        example="30",
    )
    engine_silence: float = _option(
        120.0,
        Seconds(),
        "An engine that says nothing for so long counts as hung, and `/health` says so. One step "
        "must take less: a chunk of a prompt on a slow machine.",
        example="30",
    )
    prefetch_threshold: int = _option(
        64,
        Integer(1, example=64),
        "Tokens; shorter hits in the store are recomputed.",
        example="256",
    )
    typical_tokens: int | None = _option(
        None,
        Integer(1, example=4096),
        "Length of a typical sequence, for models with sliding windows or recurrent layers: it "
        "decides how memory is divided between full pages, windows and states.",
        auto="as measured when the model was served here before, at first 2048",
        example="8192",
    )
    audit: int = _option(
        0,
        Integer(0, 100, example=5),
        "Per cent of its idle time in which the engine computes cached pages again and compares "
        "them with what every tier holds; a page that differs is evicted, counted and logged. "
        "0: never.",
        example="5",
        flag=True,
    )
    snapshot_every: int = _option(
        0,
        Integer(0, example=1024),
        "Tokens between two snapshots of recurrent state, beside those at the ends of prompts and "
        "turns and where prompts branch. 0: no others.",
        example="1024",
    )
    snapshots_per_path: int = _option(
        8,
        Integer(0, example=8),
        "Snapshots of recurrent state kept along one prefix. 0: none, and nothing is reused.",
        example="4",
    )
    debug: bool = _option(
        False,
        Switch(),
        "Check every invariant of the cache after each step. Slow.",
        example="true",
    )


OPTIONS: dict[str, Option] = {
    item.name: Option(item.name, default=item.default, **item.metadata) for item in fields(Settings)
}
