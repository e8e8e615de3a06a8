"""The door to Hugging Face `transformers`, both ways; needs only its file formats, not the package."""
