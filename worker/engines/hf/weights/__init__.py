"""The weights of the hf engine's model: loading them, and memory for other versions."""
