"""argv in, one call, exit code out."""
