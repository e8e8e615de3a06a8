"""Specs, layers and models. Knows TransformerConfig, a tensor-parallel mesh and a FusionPlan; never the world, data or disk."""
