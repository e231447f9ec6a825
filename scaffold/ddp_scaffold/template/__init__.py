"""Copier's side: where the template comes from, its questions, the answers given, and rendering."""
