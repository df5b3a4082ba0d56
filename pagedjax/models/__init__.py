"""Model families: NNX decoders that attend over pages. Knows names in files, but reads no file."""
