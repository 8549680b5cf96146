"""The one sampler of the engines whose sampling is ours: hf's, and the one that replaces SGLang's own."""
