"""OpenAI's routes: request models, text to token ids and back, chat templates, tool calls.

Every call becomes one of the worker's own requests; nothing here talks to an engine.
"""
