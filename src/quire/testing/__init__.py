"""For tests of what others plug into Quire. Nothing here is used when it runs."""
