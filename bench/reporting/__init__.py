"""Figures, tables and the page; no measurement."""
