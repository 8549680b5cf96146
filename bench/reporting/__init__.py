"""Figures, tables and the page; nothing here knows how anything is measured."""
