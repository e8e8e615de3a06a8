"""Our own Triton kernels, one file per operation, imported only when a plan asks for them.

They run on NVIDIA GPUs, and on a CPU under TRITON_INTERPRET=1, which is how their numerics are tested without one.
"""
