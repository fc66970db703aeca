"""vLLM's kernels as a P40 gets them, run on a newer NVIDIA GPU and compared with float64.

``build`` compiles the patched sources to PTX for ``compute_61``, where there is nvcc and no GPU
is needed; ``run`` lets the driver of a GPU at hand compile that PTX and launches it as vLLM's host
code would. It shows that the numbers are right, not how fast a P40 is.
"""
