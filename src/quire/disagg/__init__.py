"""Prefill and decode on separate servers: the roles, the hand-over between them, the router."""
