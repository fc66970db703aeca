"""vLLM's wheel for compute capability 6.1: what builds it is checked, then it is built."""
