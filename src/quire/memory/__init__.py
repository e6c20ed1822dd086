"""Page pools and their sizes. Nothing is imported here: the leader uses `allocator` and `layout`
without torch; `device` and `host` need it."""
