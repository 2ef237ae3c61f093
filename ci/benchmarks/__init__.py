"""Benchmarks, one per file: a function run(quick) that returns {title: table rows}."""
