"""The sampler of the hf engine, which also replaces SGLang's own."""
