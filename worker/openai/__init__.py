"""OpenAI's routes: their models, text to token ids and back, chat templates, tool calls.

Everything is turned into the worker's own requests; nothing in here talks to an engine.
"""
