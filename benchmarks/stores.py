"""Every store that has a client of its own beside that client, on servers started here.

    python benchmarks/stores.py [--rounds N] [--page SIZE] [redis] [mooncake] [s3] [file]

Prints what `quire bench store URL` measures, one line for each way, with the machine's load: the
median of the ratios of neighbouring rounds, their quartiles and extremes, and what the client does.
The servers run on the same cores: on a machine with few of them, or with others at work on it, both
sides are slower, and the ratios noisier. S3 is a test double (`moto`).
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from quire.bench import anystore  # noqa: E402
from quire.cli import store_measure  # noqa: E402
from quire.sizes import parse_size  # noqa: E402
from store_servers import Mooncake, Moto, Valkey  # noqa: E402


class Folder:
    """Beside the disk itself."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file://{folder}"

    def stop(self) -> None: ...


SERVERS = {
    "redis": Valkey,
    "mooncake": lambda folder: Mooncake(folder, holder_bytes=1 << 30),
    "s3": Moto,
    "file": Folder,
}
TOTALS = {"s3": "256MiB"}
"""Less than `quire bench store` moves: of a double that is slow."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="STORE", help=f"of {', '.join(SERVERS)}; all")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--page", default="2MiB")
    parser.add_argument("--total", help="of each round; 512MiB, of some less")
    said = parser.parse_args()
    if unknown := sorted(set(said.names) - set(SERVERS)):
        parser.error(f"{unknown[0]!r} is none of {', '.join(SERVERS)}")
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "bench")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "bench")
    for name in said.names or SERVERS:
        how = {
            "page_bytes": parse_size(said.page),
            "total_bytes": parse_size(said.total or TOTALS.get(name, "512MiB")),
            "rounds": said.rounds,
        }
        with tempfile.TemporaryDirectory() as folder:
            server = SERVERS[name](Path(folder))
            try:
                show(name, store_measure.measure(server.url, **how))
                if name in ("mooncake", "redis"):  # and beside what is faster than the client
                    show(name, anystore.run(server.url, at_best=True, **how))
            finally:
                server.stop()


def show(name: str, result: dict) -> None:
    load = os.getloadavg()[0]
    print(f"{name:9}its client: {result['client']}")
    for way in ("write", "read"):
        row = result[way]
        low, high = row["ratio_quartiles"]
        print(
            f"{name:9}{way:6} {row['store_gb_s']:.3f} GB/s, its client {row['raw_gb_s']:.3f}, "
            f"ratio {row['ratio']:.2f} (quartiles {low:.2f} … {high:.2f}; "
            f"{row['ratio_min']:.2f} … {row['ratio_max']:.2f}), load {load:.1f}"
        )
    if probe := result.get("probe"):
        print(
            f"{name:9}probe  1 key {probe['one_ms']:.2f} ms, {probe['keys']} "
            f"{probe['all_ms']:.2f} ms"
        )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
