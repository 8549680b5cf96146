"""The sampler that replaces SGLang's own, inside its schedulers."""
