"""Meshes, data, optimizer, loop, disk, metrics."""
