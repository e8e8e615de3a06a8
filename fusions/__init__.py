"""The fused operations. A leaf: knows torch, no model and no configuration object.

`registry`, `catalogue` and `machine` don't import torch, so that a plan can be made and shown without it.
"""
