"""Memories on disk: page and segment files, and the SQLite manifest that says which of them count."""
