"""Models by their ids on the hub: from its cache, from the network, or a sentence why not.
No test reaches for the network: the library is one that answers as the test says."""

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from quire.errors import ModelError
from quire.models import resolve
from quire.models.download import is_hub_id


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Downloads end as `hub.result` says; `hub.calls` are those that were made."""

    class Hub:
        def __init__(self):
            self.calls = []
            self.cached = None
            self.result = tmp_path / "snapshot"

        def download(self, *, local_files_only=False, **where):
            self.calls.append(("local" if local_files_only else "network", where))
            if local_files_only:
                if self.cached is None:
                    raise LocalEntryNotFoundError("nothing cached")
                return str(self.cached)
            if isinstance(self.result, Exception):
                raise self.result
            return str(self.result)

    found = Hub()
    found.result.mkdir()
    for name in ("config.json", "model.safetensors"):
        (found.result / name).write_bytes(b"{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", found.download)
    return found


@pytest.mark.parametrize("name", ["a/b", "Qwen/Qwen3-0.6B", "a-b/c_d@main", "a/b@refs/pr/1"])
def test_ids(name):
    assert is_hub_id(name)


@pytest.mark.parametrize(
    "name", ["a", "a/b/c", "./a/b", "../b", "/a/b", "~/a", "a b/c", "a/b.gguf/"]
)
def test_paths_are_no_ids(name):
    assert not is_hub_id(name)


def test_what_is_not_here_is_downloaded(hub):
    said = []
    found = resolve("some/model@v2", lambda what, done: said.append(what))
    assert found == hub.result
    assert [kind for kind, _ in hub.calls] == ["local", "network"]
    where = hub.calls[1][1]
    assert where["repo_id"] == "some/model"
    assert where["revision"] == "v2"
    assert not any("py" in pattern or "bin" in pattern for pattern in where["allow_patterns"])
    assert said == ["downloading some/model@v2"]


def test_what_is_cached_needs_no_network(hub):
    hub.cached, hub.result = hub.result, OSError("no network")
    assert resolve("some/model") == hub.cached
    assert [kind for kind, _ in hub.calls] == ["local"]


def test_a_download_that_was_broken_off_is_taken_up(hub, tmp_path):
    hub.cached = tmp_path / "half"
    hub.cached.mkdir()
    (hub.cached / "config.json").write_text("{}")
    assert resolve("some/model") == hub.result


def test_without_the_network_a_sentence_says_so(hub):
    hub.result = ConnectionError("[Errno 101]\nNetwork is unreachable")
    with pytest.raises(ModelError, match=r"is not here.*Network is unreachable") as caught:
        resolve("some/model")
    assert "\n" not in str(caught.value)


def test_a_directory_of_that_name_comes_first(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some/model").mkdir(parents=True)
    with pytest.raises(ModelError, match="some/model"):
        resolve("some/model")
    assert not hub.calls
