"""Small arrays between host and device: they arrive as they were, in memory that is used again when
it is free. On CUDA, and on a CPU."""

import numpy as np
import torch


def check_arrays_of_all_types_arrive(staging):
    arrays = [
        np.arange(1000, dtype=np.int32),
        np.arange(77, dtype=np.int64)[:, None] ** 3,
        np.array([[True, False, True]]),
        np.zeros(0, dtype=np.int32),
        np.linspace(0, 1, 7),
        np.linspace(0, 1, 7, dtype=np.float32),
    ]
    for array, there in zip(arrays, staging.send(arrays), strict=True):
        assert there.shape == array.shape
        assert (there.cpu().numpy() == array).all()


def check_what_is_sent_stays_what_it_was_when_its_memory_is_used_again(staging):
    sent = [staging.send([np.full(3000, i, dtype=np.int64)])[0] for i in range(50)]
    assert [int(there[0]) for there in sent] == list(range(50))
    assert all(bool((there == there[0]).all()) for there in sent)


def check_words_are_filled_in_place(staging):
    target = torch.zeros(5000, dtype=torch.int32, device=staging._device)
    block = target[2000:3000].view(10, 100)[:, :7]
    for i in range(1, 20):
        with staging.filling(target[:1000], block) as (words, inner):
            words[:] = i
            inner[:] = i * np.arange(10)[:, None]
        assert target[:1000].eq(i).all()
        assert block.cpu().tolist() == [[i * row] * 7 for row in range(10)]
    assert not target[1000:2000].any()
    assert not target[2000:3000].view(10, 100)[:, 7:].any()


def check_what_comes_back_is_what_there_was_and_not_what_came_later(staging):
    tensor = torch.arange(300, device=staging._device).view(3, 100)
    coming = []
    for _ in range(10):
        coming.append(staging.receive(tensor))
        tensor += 1
    for i, one in enumerate(coming):
        found = one.wait()
        assert found.shape == (3, 100)
        assert found[0, 0] == i
    assert staging.receive(torch.rand(7, 3, dtype=torch.float64, device=tensor.device)).wait().any()


def check_memory_is_used_again(staging):
    for _ in range(100):
        staging.receive(torch.ones(10, dtype=torch.int64, device=staging._device)).wait()
        staging.send([np.arange(10)])
    assert sum(map(len, staging._in_use.values())) <= 4


CHECKS = [
    check_arrays_of_all_types_arrive,
    check_what_is_sent_stays_what_it_was_when_its_memory_is_used_again,
    check_words_are_filled_in_place,
    check_what_comes_back_is_what_there_was_and_not_what_came_later,
    check_memory_is_used_again,
]
