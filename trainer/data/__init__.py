"""From text to batches: .bin/.idx files, the index of samples, the batches of an iteration."""
