"""What GPU code can run on a card, found without one: binaries read, Triton kernels compiled."""
