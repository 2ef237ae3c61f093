"""Graphs of modules: tracing a forward, matching patterns, and rewriting nodes."""
