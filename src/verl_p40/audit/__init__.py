"""What in a tree, a script or a command still needs an Ampere card, or does nothing at all."""
