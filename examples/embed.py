"""How an engine embeds Quire: one manager, one worker in this process, a store.

The second request finds on the device what the first left there. Run it again with the same URL of
a file store: then also the first finds it, in the store.

    python examples/embed.py file:///tmp/quire-example
"""

import sys
import time

import quire

URL = sys.argv[1] if len(sys.argv) > 1 else "memory://"
PAGE_SIZE, DEVICE_PAGES, HOST_PAGES = 16, 64, 128

# 1. The worker owns the memory of one rank. The layout says what a page looks like; the engine's
#    attention kernels read and write `worker.components["full"].device` (one tensor per layer and
#    plane, [page, token, head, dim]). The fingerprint must identify the weights.
layout = quire.PageLayout("full", 4, 2, 32, "float32", PAGE_SIZE)
component = quire.ComponentConfig(layout, DEVICE_PAGES, HOST_PAGES)
workers = quire.open_workers([quire.WorkerConfig(0, 1, "weights-digest", [component])])

# 2. The manager decides everything and touches no byte. Sizes are in pages.
prefetch = quire.PrefetchConfig(policy=quire.PrefetchPolicy.WAIT_COMPLETE, threshold_tokens=64)
config = quire.CacheConfig(PAGE_SIZE, DEVICE_PAGES, HOST_PAGES, prefetch=prefetch)
manager = quire.CacheManager(config, clock=time.monotonic)


def step() -> None:
    """Once per scheduler step: what the workers report goes in, what they should do comes out."""
    workers.submit(manager.step(workers.poll()))


# 3. The store may be attached, changed and detached at any time, also under load.
change = manager.store.attach(URL)
while not change.done:
    step()
if change.error:
    sys.exit(change.error)

# 4. A request: tokens become a key once. Whatever must not share state differs in the namespace.
namespace = quire.Namespace("weights-digest", "float32", PAGE_SIZE, salt="tenant-1")
key = quire.PrefixKey(namespace, [(7 * i) % 1000 for i in range(20 * PAGE_SIZE + 5)])


def serve(name: str) -> None:
    with manager.acquire(manager.match(key), quire.RequestId(name)) as lease:
        manager.prefetch(lease)  # on arrival: look into the store while the request queues
        while not manager.ready(lease):
            step()
        manager.admit(lease)  # take in what has arrived
        manager.load(lease)  # host → device; a real engine waits layer by layer: worker.wait_layer
        while lease.load_state is quire.LoadState.LOADING:
            step()
        reused = lease.num_device
        if not manager.extend(lease, key.num_pages - reused):  # pages of its own for the rest
            sys.exit("the device is full: queue the request and try again later")
        table = quire.page_array(lease.pages)  # the page table for the attention kernels
        # ... the model computes the tokens after reused * PAGE_SIZE into the pages of the table ...
        manager.commit(lease, key)  # from here on other requests share them
    # The lease is released. What it computed goes to host and store in the steps after.
    step()
    while not manager.idle or manager.waiting_writes:
        step()
    print(f"{name}: {reused} of {key.num_pages} pages reused, page table {table[:4]}…")


serve("request-1")
serve("request-2")
workers.close()
