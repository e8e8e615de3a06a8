"""Megatron's tensor and sequence parallel scheme: regions, parameters as DTensors, and the parallel layers."""
