"""Devices as people name them on the command line."""

from __future__ import annotations

from quire.errors import ConfigError


def check_device(name: str) -> None:
    """Raises ConfigError for one that this machine does not have."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is not known: use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices that "
            "torch can use: use --device cpu, or install a CUDA build of torch"
        )
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not supported: use cpu, cuda or cuda:N")
