"""A wheel, built here and installed into an empty environment, serves by one command.

What it depends on is lent by this environment: it is not what is tested, and large.
"""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
WAIT_S = 300.0
"""Only how long a broken test takes to fail."""


def run(*command: object, **options) -> str:
    done = subprocess.run(
        [str(each) for each in command],
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_a_wheel_in_an_empty_environment_serves(tmp_path):
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=leave)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(
        *pip,
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tmp_path,
        source,
        env=environ,
    )
    (wheel,) = tmp_path.glob("*.whl")
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    run(*pip, "--python", home / "bin/python", "install", "-q", "--no-deps", wheel, env=environ)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(home / "bin/python", "-c", "import quire; print(quire.__file__)", env=environ)
    assert Path(where.strip()).is_relative_to(home)
    command = [home / "bin/quire", "serve", "--port", "0", "--store", "none"]
    command += ["--device-memory", "64MiB", "--host-memory", "64MiB"]
    server = subprocess.Popen(
        [str(each) for each in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
        cwd=tmp_path,
    )
    try:
        url = next(line for line in server.stdout if "is ready at" in line).split()[-1]
        assert "<title>Quire</title>" in httpx.get(f"{url}/ui").text
        assert httpx.get(f"{url}/ui/app.js").status_code == 200
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "Once", "max_tokens": 2}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S)
        assert answer.json()["usage"]["completion_tokens"] == 2
        server.send_signal(signal.SIGINT)
        assert server.wait(WAIT_S) == 0
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
