"""What a job needs and how long a step takes, before there is a machine for it.

walk.py       one real training step on fake tensors, as rank 0 of N                 -> Walk
live.py       the bytes of all tensors alive, in a walk and in a real step alike
work.py       FLOPs and bytes moved, operation by operation
devices.py    what devices can do, from their datasheets or measured
estimate.py   a Walk on a device                                                     -> seconds
search.py     other layouts of the same job, the fastest that fits first
measure.py    the same step for real, on this machine's CPU
"""
