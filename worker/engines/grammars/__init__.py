"""Grammars of structured outputs: checked in a process of their own, then compiled for a model's tokens."""
