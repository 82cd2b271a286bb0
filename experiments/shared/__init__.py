"""Infrastructure of every experiment: cached cells, presets, models and the runner."""
