"""Rewake: a local LLM server whose agents never re-read."""
