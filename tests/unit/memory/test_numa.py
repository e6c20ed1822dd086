"""Which node a device is near, by a made-up machine's files; and that asking does no harm."""

import mmap

import numpy as np
import pytest

from quire.memory.numa import node_of_device, prefer_node

ADDRESS = "0000:3b:00.0"


@pytest.fixture
def machine(tmp_path):
    def make(online, node):
        (tmp_path / "sys/devices/system/node").mkdir(parents=True)
        (tmp_path / "sys/devices/system/node/online").write_text(f"{online}\n")
        (tmp_path / "sys/bus/pci/devices" / ADDRESS).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / ADDRESS / "numa_node").write_text(f"{node}\n")
        return tmp_path

    return make


def test_a_device_of_a_machine_with_two_nodes_is_near_one(machine):
    assert node_of_device(ADDRESS, machine("0-1", 1)) == 1


@pytest.mark.parametrize(("online", "node"), [("0", 0), ("0-1", -1), ("0-1", "?")])
def test_one_node_or_none_that_is_known(machine, online, node):
    assert node_of_device(ADDRESS, machine(online, node)) is None


def test_a_device_that_is_not_there(machine, tmp_path):
    assert node_of_device("0000:00:00.0", machine("0-1", 1)) is None
    assert node_of_device(ADDRESS, tmp_path / "nothing") is None


@pytest.mark.parametrize("node", [0, 1000, -1])
def test_memory_is_usable_whether_the_kernel_does_as_asked_or_not(node):
    with mmap.mmap(-1, 1 << 20) as mapping:
        view = np.frombuffer(mapping, dtype=np.uint8)
        prefer_node(view.ctypes.data, len(view), node)
        view[:] = 7
        assert view.sum() == 7 << 20
        del view
