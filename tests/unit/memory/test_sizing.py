"""Available memory is the tightest of machine and containers, and the refusal says whose it is."""

import pytest

from quire.errors import MemoryBudgetError
from quire.memory.sizing import GIB, available_memory, check_host_budget


class Machine:
    """A fake root with /proc and cgroup files."""

    def __init__(self, root, available_gib):
        self.root = root
        self.write(
            "proc/meminfo",
            f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\n"
            f"MemAvailable: {available_gib * GIB // 1024} kB\n",
        )

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))

    def v2(self, path, limit, used, inactive_file=0):
        folder = f"sys/fs/cgroup/{path}"
        self.write(f"{folder}/memory.max", limit)
        self.write(f"{folder}/memory.current", used)
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {inactive_file}\n")

    def v1(self, path, limit, used):
        folder = f"sys/fs/cgroup/memory/{path}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", used)
        self.write(f"{folder}/memory.stat", f"total_inactive_file {GIB}\n")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path, available_gib=40)


def test_without_cgroups_the_machine_counts(machine):
    memory = available_memory(machine.root)
    assert memory.available_bytes == 40 * GIB
    assert "machine" in memory.origin


def test_cgroup_v2_limit_less_what_is_used_and_cannot_be_reclaimed(machine):
    machine.write("proc/self/cgroup", "0::/pod/app\n")
    machine.v2("pod/app", 8 * GIB, 3 * GIB, inactive_file=GIB)
    memory = available_memory(machine.root)
    assert memory.available_bytes == 6 * GIB
    assert "cgroup v2 memory.max of /pod/app" in memory.origin


def test_a_tighter_ancestor_wins(machine):
    machine.write("proc/self/cgroup", "0::/pod/app\n")
    machine.v2("pod/app", "max", 0)
    machine.v2("pod", 4 * GIB, GIB)
    assert available_memory(machine.root).available_bytes == 3 * GIB


def test_inside_a_container_the_mount_is_the_group(machine):
    machine.write("proc/self/cgroup", "0::/kubepods/of/the/host\n")
    machine.v2("", 4 * GIB, 0)
    memory = available_memory(machine.root)
    assert memory.available_bytes == 4 * GIB
    assert memory.origin.endswith("of /")


def test_cgroup_v1(machine):
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n")
    machine.v1("docker/abc", 6 * GIB, 4 * GIB)
    memory = available_memory(machine.root)
    assert memory.available_bytes == 3 * GIB
    assert "cgroup v1" in memory.origin


def test_v1_spells_no_limit_as_a_huge_number(machine):
    machine.write("proc/self/cgroup", "4:memory:/\n")
    machine.v1("", (1 << 63) - 4096, GIB)
    assert available_memory(machine.root).available_bytes == 40 * GIB


def test_too_much_is_refused_in_one_sentence_with_the_fix(machine):
    check_host_budget(30 * GIB, root=machine.root)
    with pytest.raises(MemoryBudgetError) as refusal:
        check_host_budget(100 * GIB, what="host pool 'full'", root=machine.root)
    sentence = str(refusal.value)
    assert "host pool 'full' asks for 100.00 GiB" in sentence
    assert "40.00 GiB available under the machine's memory" in sentence
    assert "set host_bytes to at most 38.00 GiB" in sentence
    assert "\n" not in sentence


def test_this_machine_can_be_read():
    assert 0 < available_memory().available_bytes <= available_memory().limit_bytes
