"""Ways for the bytes of pages that were granted: pushed over the connection, or mapped."""
