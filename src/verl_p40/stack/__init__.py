"""Facts about the software stack: pins, locks, paths, and the environment built from them."""
