"""One file per benchmark; a benchmark is a function `run(quick) -> {title: rows}`."""
