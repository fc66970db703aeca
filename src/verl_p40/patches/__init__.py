"""The patch queue: load it, apply it to an installed tree, check it, re-export it."""
