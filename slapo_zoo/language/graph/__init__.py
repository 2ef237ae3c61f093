"""Graphs of modules: tracing, matching and rewriting."""
