"""Private parts of gem_precision."""
