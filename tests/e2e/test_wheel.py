"""What is published: it can be, it is whole, and a wheel in an empty environment serves.

What it depends on is lent by this environment: it is not what is tested, and large.
"""

import email
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
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


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy: building leaves things behind."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", folder / "src", ignore=leave)
    return folder


def test_what_is_published_is_whole(source, tmp_path):
    pytest.importorskip("build")
    pytest.importorskip("twine")
    made = tmp_path / "dist"
    # A wheel from the archive of sources: what is not in that is not in either.
    run(sys.executable, "-m", "build", "--no-isolation", "-o", made, source)
    files = sorted(made.iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    with zipfile.ZipFile(files[0]) as wheel:
        inside = set(wheel.namelist())
        (about,) = [name for name in inside if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(wheel.read(about))
    ours = (path for path in (ROOT / "src/quire").rglob("*") if path.is_file())
    kept = {str(path.relative_to(ROOT / "src")) for path in ours if path.suffix != ".pyc"}
    assert kept - inside == set()
    for field in ("Summary", "Author", "License-Expression", "Keywords", "Requires-Python"):
        assert metadata[field], field
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in metadata.get_all("Classifier")


def test_a_wheel_in_an_empty_environment_serves(source, tmp_path):
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
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
